"""Interface of CPU expert backends: one token times several experts, or one expert times a few
tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from runtime.control.plan import Place
from runtime.kernels.cpu.row_shares import RowShares


class TokenOperands(NamedTuple):
    """The last arguments of every kernel: the token [H], the row of `y` [K, H] for each expert, and
    an empty array of the weights' type."""

    x: np.ndarray
    rows: np.ndarray
    y: np.ndarray
    like: np.ndarray


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Layout of experts [H, I neurons] for the kernel of a whole layer: `matrices` has the kind of
    gate, up and down, and the offset of each in an expert of `nbytes`."""

    hidden_size: int
    num_neurons: int
    matrices: tuple[tuple[int, int], ...]
    nbytes: int


class CpuForm:
    """Backend that multiplies tokens by experts of one form. It takes less time than torch for up
    to `most_tokens` tokens of an expert."""

    is_replica: bool = False
    most_tokens: int = 1
    rows: RowShares | None = None  # these experts matrix by matrix; others `multiply` otherwise

    def whole(self) -> LayerForm | None:
        """Return the layout of these experts for the kernel of a whole layer; None if it does not
        take them."""
        return None

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        """Add the output of the expert at each address of `starts` to its row. Only the backend of
        segments reads `places`."""
        self.rows.multiply(starts, operands.rows, operands.x, operands.y)

    def forward(self, place: Place, start: int, x: torch.Tensor, like: np.ndarray) -> torch.Tensor:
        """Compute the expert at this address on its tokens, x [t, H] -> [t, H]: here one after
        another."""
        y = np.zeros(x.shape, np.float32)
        for row, token in enumerate(x.float().numpy()):
            self.multiply([place], [start], TokenOperands(token, np.array([row]), y, like))
        return torch.from_numpy(y).to(x.dtype)

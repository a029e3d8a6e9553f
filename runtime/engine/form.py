"""Interface of CPU expert backends: one token times several experts, or one expert times a few
tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.control.plan import Place
from runtime.engine.row_shares import RowShares
from runtime.engine.token_operands import TokenOperands


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Layout of experts [H, I neurons] for the kernel of a whole layer: `matrices` has the kind of
    gate, up and down, and the offset of each in an expert of `nbytes`."""

    hidden_size: int
    num_neurons: int
    matrices: tuple[tuple[int, int], ...]
    nbytes: int


class CpuForm(ABC):
    """Backend that multiplies tokens by experts of one form. It takes less time than torch for up
    to `most_tokens` tokens of an expert."""

    most_tokens: int = 1
    rows: RowShares | None = None  # how threads share the rows of these experts, if they can

    def whole(self) -> LayerForm | None:
        """Return the layout of these experts for the kernel of a whole layer; None if it does not
        take them."""
        return None

    @abstractmethod
    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        """Add the output of the expert at each address of `starts` to its row. Only the backend of
        segments reads `places`."""

    def forward(self, place: Place, start: int, x: torch.Tensor, like: np.ndarray) -> torch.Tensor:
        """Compute the expert at this address on its tokens, x [t, H] -> [t, H]: here one after
        another."""
        y = np.zeros(x.shape, np.float32)
        for row, token in enumerate(x.float().numpy()):
            self.multiply([place], [start], TokenOperands(token, np.array([row]), y, like))
        return torch.from_numpy(y).to(x.dtype)

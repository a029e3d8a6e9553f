"""What a form of experts in RAM does, whatever the form: one token by several experts, one expert
on a few tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.control.plan import Place
from runtime.engine.token_operands import TokenOperands


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What the kernel of a whole layer knows of experts [H, I neurons]: by `matrices` the kind of
    gate, up and down and where they begin in an expert of `nbytes`."""

    hidden_size: int
    num_neurons: int
    matrices: tuple[tuple[int, int], ...]
    nbytes: int


class CpuForm(ABC):
    """Multiplies tokens by experts of one form; on up to `most_tokens`, an expert takes it less
    time than torch."""

    most_tokens: int = 1

    def whole(self) -> LayerForm | None:
        """How the kernel of a whole layer takes such experts; None: it does not."""
        return None

    @abstractmethod
    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        """Add the output of the expert at each address of `starts` to its row. Only segments look
        at `places`."""

    def forward(self, place: Place, start: int, x: torch.Tensor, like: np.ndarray) -> torch.Tensor:
        """Compute the expert at this address on its tokens, x [t, H] -> [t, H]: here one after
        another."""
        y = np.zeros(x.shape, np.float32)
        for row, token in enumerate(x.float().numpy()):
            self.multiply([place], [start], TokenOperands(token, np.array([row]), y, like))
        return torch.from_numpy(y).to(x.dtype)

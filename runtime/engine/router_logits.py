"""What a router says of an input that is not its own."""

import torch
from torch import nn
from torch.nn.functional import linear


class Gate:
    """A router's logits [T, E], without what it goes on to do with them: choosing takes ten times as long as its
    matrix. Whether they are that matrix times the input and no more is seen by its first answer; a router of another
    kind goes on answering whole."""

    def __init__(self, gate: nn.Module) -> None:
        self._gate = gate
        self._is_linear: bool | None = None  # None: not known yet

    def logits(self, x: torch.Tensor, extra: tuple) -> torch.Tensor:
        """For x [..., H] and what else the router is given."""
        if self._is_linear:
            return self._linear(x)
        whole = type(self._gate).forward(self._gate, x, *extra)[0]  # past the hooks, which would keep it
        if self._is_linear is None:
            self._is_linear = self._multiplies(x) and torch.equal(self._linear(x), whole)
        return whole

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2), self._gate.weight, getattr(self._gate, "bias", None))

    def _multiplies(self, x: torch.Tensor) -> bool:
        weight = getattr(self._gate, "weight", None)
        return weight is not None and weight.dim() == 2 and (weight.dtype, weight.shape[1]) == (x.dtype, x.shape[-1])

"""A step's tokens on devices that share no memory: each gets its copy of them once, and outputs come back to the first.

No project machine has had two GPUs: what the tests run of this is its bookkeeping, on one device.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from runtime.control.plan import Place
from runtime.model.arithmetic import Assigned, assign, gather
from runtime.tiers.fast import Resident


class Apart:
    """The tokens `hidden` [T, H] of a step, and `selected` [T, K] the experts that they go to, -1 for none."""

    def __init__(self, resident: Resident, hidden: torch.Tensor, selected: np.ndarray) -> None:
        self._resident, self._hidden, self._selected = resident, hidden, selected
        self._there: dict[torch.device, tuple[torch.Tensor, dict[int, Assigned]]] = {}

    def forward(self, module: nn.Module, place: Place, expert: int) -> torch.Tensor:
        """One expert on its tokens where it lies: [t, H], where the tokens are."""
        device = self._resident.slots[place.slot].device
        hidden, assigned = self._on(device)
        with _current(device):
            y = self._resident.forward(module, place, gather(hidden, assigned[expert]))
        return y.to(self._hidden.device, non_blocking=True)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, dict[int, Assigned]]:
        if device not in self._there:
            self._there[device] = self._hidden.to(device, non_blocking=True), assign(self._selected, device)
        return self._there[device]


def _current(device: torch.device) -> AbstractContextManager:
    """Kernels of triton run on the current device, wherever their operands lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

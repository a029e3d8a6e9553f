"""A step's tokens on devices that share no memory: copied to each device once, and outputs copied
back to the first.

No project machine has had two GPUs: tests cover the bookkeeping of this module, on one device.
"""

import numpy as np
import torch
from torch import nn

from runtime.control.plan import Place
from runtime.devices import made_current
from runtime.model.arithmetic import Assigned, assign, gather
from runtime.tiers.fast import ResidentExperts


class AcrossDevices:
    """The tokens `hidden` [T, H] of a step, which go to the experts `selected` [T, K], -1 for
    none."""

    def __init__(
        self, resident: ResidentExperts, hidden: torch.Tensor, selected: np.ndarray
    ) -> None:
        self._resident = resident
        self._hidden = hidden
        self._selected = selected
        self._copies: dict[torch.device, tuple[torch.Tensor, dict[int, Assigned]]] = {}

    def forward(self, module: nn.Module, place: Place, expert: int) -> torch.Tensor:
        """Compute one expert on its tokens, on the device of its slot: [t, H], on the device of the
        tokens."""
        device = self._resident.slots[place.slot].device
        hidden, assigned = self._copy_on(device)
        with made_current(device):
            y = self._resident.forward(module, place, gather(hidden, assigned[expert]))
        return y.to(self._hidden.device, non_blocking=True)

    def _copy_on(self, device: torch.device) -> tuple[torch.Tensor, dict[int, Assigned]]:
        if device not in self._copies:
            self._copies[device] = (
                self._hidden.to(device, non_blocking=True),
                assign(self._selected, device),
            )
        return self._copies[device]

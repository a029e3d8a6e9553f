"""The slots of the fast tier: one buffer on the device, shared out by pools."""

from collections.abc import Sequence

import torch

from artifacts.errors import OutOfResources
from runtime.pools import Pool
from runtime.weights import aligned, round_up


class Slots:
    """`slots[i]` is uint8 [nbytes of its pool]; all begin on borders of 64 bytes. Raises OutOfResources.

    `arena` is the buffer, and `starts[i]` where slot i begins in it: kernels find an expert by the number of its slot.
    """

    def __init__(self, pools: Sequence[Pool], device: torch.device) -> None:
        sizes = [pool.slot_nbytes for pool in pools for _ in range(pool.num_slots)]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + round_up(size))
        self.nbytes, self.device = starts[-1], device
        self.starts = starts[:-1]
        if device.type == "cpu":
            self.arena = aligned(self.nbytes)
        else:
            self.arena = _on_device(self.nbytes, device)
        self._slots = [self.arena[start : start + size] for start, size in zip(self.starts, sizes, strict=True)]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self._slots[slot]

    def alike(self) -> list[torch.Tensor]:
        """Those as large as the first."""
        return [slot for slot in self._slots if len(slot) == len(self._slots[0])]


def _on_device(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise OutOfResources(
            f"no room for {nbytes / 2**30:.2f} GiB of slots on {device}: give a smaller --budget"
        ) from error

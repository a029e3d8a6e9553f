"""The slots of the fast tier: a buffer on each device, shared out by pools."""

from collections.abc import Sequence

import torch

from artifacts.errors import OutOfResources
from runtime.control.pools import Pool
from runtime.kernels.batched import IN_CACHE
from runtime.model.layout import Part, aligned, round_up
from runtime.tiers.double_mapping import twofold


class Slots:
    """`slots[i]` is uint8 [nbytes of its pool] on its pool's device; all begin on borders of 64 bytes. Raises
    OutOfResources.

    `arenas` are the buffers by device, which may be parts of one; `starts[i]` is where slot i begins in its own:
    kernels find an expert by the number of its slot, where there is one arena. Of a few alike on a CPU `beside` has the
    `parts` as well, by name, uint8 [slots, nbytes of the part], where they lie side by side: it is the same memory.
    """

    def __init__(self, pools: Sequence[Pool], devices: Sequence[torch.device], *, parts: Sequence[Part] = ()) -> None:
        self.device_of = [pool.device for pool in pools for _ in range(pool.num_slots)]  # by slot
        self.are_apart = len(set(devices)) > 1  # on devices that share no memory
        sizes = [pool.slot_nbytes for pool in pools for _ in range(pool.num_slots)]
        ends, self.starts = [0] * len(devices), []
        for device, size in zip(self.device_of, sizes, strict=True):
            self.starts.append(ends[device])
            ends[device] += round_up(size)
        self.nbytes, self.device = sum(ends), devices[0]
        self.beside: dict[str, torch.Tensor] = {}
        if found := twofold(len(sizes), parts) if self._are_few_alike(sizes, parts) else None:
            only, self.beside = found
            self.arenas = [only]
        else:
            self.arenas = [_arena(nbytes, device) for nbytes, device in zip(ends, devices, strict=True)]
        places = zip(self.device_of, self.starts, sizes, strict=True)
        self._slots = [self.arenas[device][start : start + size] for device, start, size in places]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self._slots[slot]

    def _are_few_alike(self, sizes: Sequence[int], parts: Sequence[Part]) -> bool:
        """Whether each holds these parts and nothing else, and together they stay in the cache of a CPU."""
        nbytes = sum(part.nbytes for part in parts)
        fit = bool(parts) and self.nbytes <= IN_CACHE and self.device.type == "cpu"
        return fit and len(self.starts) > 1 and set(sizes) == {nbytes} and not any(self.device_of)

    @property
    def arena(self) -> torch.Tensor:
        """The one there is."""
        (only,) = self.arenas
        return only

    def alike(self) -> list[torch.Tensor]:
        """Those as large as the first, where it is."""
        first = self._slots[0]
        return [slot for slot in self._slots if len(slot) == len(first) and slot.device == first.device]


def _arena(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return aligned(nbytes)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise OutOfResources(
            f"no room for {nbytes / 2**30:.2f} GiB of slots on {device}: give a smaller --budget"
        ) from error

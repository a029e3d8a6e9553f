"""The slots of the fast tier: one buffer a device, divided among pools."""

from collections.abc import Sequence

import torch

from artifacts.errors import OutOfResources
from runtime.control.pools import Pool
from runtime.devices import is_host
from runtime.kernels.batched import IN_CACHE
from runtime.model.layout import Part, aligned, round_up
from runtime.tiers.double_mapping import map_twice


class Slots:
    """`slots[i]` is uint8 [nbytes of its pool] on its pool's device and begins on a 64-byte border.
    Raises NoRoom.

    `arenas` are the buffers by device, and `starts[i]` is the offset of slot i in its arena; with
    one arena, kernels find an expert by the number of its slot. For a few slots of the same size on
    a CPU, `by_part` gives the same memory by the name of one of `parts`, uint8 [slots, nbytes of
    the part].
    """

    def __init__(
        self, pools: Sequence[Pool], devices: Sequence[torch.device], *, parts: Sequence[Part] = ()
    ) -> None:
        self.device_of = [pool.device for pool in pools for _ in range(pool.num_slots)]  # by slot
        self.are_apart = len(set(devices)) > 1  # on devices that do not share memory
        sizes = [pool.slot_nbytes for pool in pools for _ in range(pool.num_slots)]
        ends = [0] * len(devices)
        self.starts = []
        for device, size in zip(self.device_of, sizes, strict=True):
            self.starts.append(ends[device])
            ends[device] += round_up(size)
        self.nbytes = sum(ends)
        self.device = devices[0]
        self.by_part: dict[str, torch.Tensor] = {}
        if mapped := map_twice(len(sizes), parts) if self._fit_in_cache(sizes, parts) else None:
            arena, self.by_part = mapped
            self.arenas = [arena]
        else:
            self.arenas = [
                _new_arena(nbytes, device) for nbytes, device in zip(ends, devices, strict=True)
            ]
        places = zip(self.device_of, self.starts, sizes, strict=True)
        self._slots = [self.arenas[device][start : start + size] for device, start, size in places]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self._slots[slot]

    @property
    def arena(self) -> torch.Tensor:
        """The arena of slots on a single device."""
        (arena,) = self.arenas
        return arena

    def alike(self) -> list[torch.Tensor]:
        """Return the slots that have the size and the device of the first."""
        first = self._slots[0]
        return [
            slot for slot in self._slots if len(slot) == len(first) and slot.device == first.device
        ]

    def _fit_in_cache(self, sizes: Sequence[int], parts: Sequence[Part]) -> bool:
        """Return whether there are several slots on one CPU, each holds exactly these parts, and
        all together fit in the CPU's cache."""
        nbytes = sum(part.nbytes for part in parts)
        fit = bool(parts) and self.nbytes <= IN_CACHE and is_host(self.device)
        return fit and len(self.starts) > 1 and set(sizes) == {nbytes} and not any(self.device_of)


class NoRoom(OutOfResources):
    """No memory for the slots of a budget: a smaller one would do."""


def _new_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        if is_host(device):
            return aligned(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (OutOfResources, torch.OutOfMemoryError) as error:
        raise NoRoom(
            f"no room for {nbytes / 2**30:.2f} GiB of slots on {device}: give a smaller --budget"
        ) from error

"""The fast tier as pools: slots of one size, the keys that may use them, and the device they are
on."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape


@dataclass(frozen=True, slots=True)
class Pool:
    """The keys from `first` up to `stop`, of whole layers, that belong to `device` share
    `num_slots` slots of `slot_nbytes` there.

    In a pool that `is_passing`, keys stay only while they are used: the least recently used is
    evicted first, and no eviction policy is asked.
    """

    first: int
    stop: int
    num_slots: int
    slot_nbytes: int
    is_passing: bool = False
    device: int = 0


def whole_experts(shape: Shape, capacities: np.ndarray, *, is_global: bool) -> tuple[Pool, ...]:
    """Return, for each device, one pool for all layers or one for each layer, of `capacities` [L,
    N] experts."""
    if is_global:
        totals = capacities.sum(axis=0).tolist()
        return tuple(
            Pool(0, shape.num_keys, count, shape.expert_nbytes, device=device)
            for device, count in enumerate(totals)
        )
    return tuple(
        Pool(
            layer * shape.num_experts,
            (layer + 1) * shape.num_experts,
            count,
            shape.expert_nbytes,
            device=device,
        )
        for layer, counts in enumerate(capacities.tolist())
        for device, count in enumerate(counts)
    )


@dataclass(frozen=True, slots=True)
class Partitions:
    """Deals experts out to devices: expert e of every layer belongs to device `e % count`, and is
    never resident on another.

    Everything but the experts is computed on device 0. Raises BadUsage for more devices than a
    layer has experts.
    """

    num_experts: int
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.num_experts:
            raise BadUsage(
                f"--devices {self.count}: a layer has {self.num_experts} experts, so give 1 to "
                f"{self.num_experts}"
            )

    def of(self, key: int) -> int:
        """Return the device of a key or of a segment's key."""
        return key % self.num_experts % self.count

    def keys(self, pool: Pool) -> np.ndarray:
        """Return the keys [n] that may have a slot of a pool, ascending."""
        keys = np.arange(pool.first, pool.stop)
        return keys if self.count == 1 else keys[self.of(keys) == pool.device]

    @property
    def hops(self) -> np.ndarray | None:
        """Number [E] of devices between an expert and the compute: 0 on the first device, 1 on all
        others; None for a single device."""
        if self.count == 1:
            return None
        return (np.arange(self.num_experts) % self.count > 0).astype(np.int64)

    def dealt(self, capacities: np.ndarray, *, num_layers: int = 1) -> np.ndarray:
        """Return the slots [n, N] of each device, given the slots [n] of all, each row for the
        experts of `num_layers` layers.

        Slots are spread as evenly as the experts allow; a remainder goes to the devices with the
        fewest slots so far.
        """
        if self.count == 1:
            return capacities[:, None]
        rooms = num_layers * np.bincount(np.arange(self.num_experts) % self.count)
        dealt = np.zeros((len(capacities), self.count), np.int64)
        for row, capacity in zip(dealt, capacities.tolist(), strict=True):
            assert capacity <= rooms.sum(), f"{capacity} slots for {rooms.sum()} experts"
            held = dealt.sum(axis=0)
            row[:] = np.minimum(rooms, capacity // self.count)
            while left := capacity - row.sum():
                order = np.lexsort((held, row))
                row[order[row[order] < rooms[order]][:left]] += 1
        return dealt

    def evened(self, capacities: np.ndarray) -> np.ndarray:
        """Return the slots [L] of each layer, at least one for each device if there are enough: the
        layer with the most gives."""
        evened = capacities.copy()
        if 1 < self.count <= evened.sum() / len(evened):
            while evened.min() < self.count:
                evened[evened.argmin()] += 1
                evened[evened.argmax()] -= 1
        return evened


def check_each_has_a_slot(pools: Iterable[Pool]) -> None:
    """Raise BadUsage when a device has no slot for its experts of a layer while other devices have
    some."""
    found = list(pools)
    some = {pool.first for pool in found if pool.num_slots}
    if starved := [pool for pool in found if not pool.num_slots and pool.first in some]:
        raise BadUsage(
            f"the budget leaves device {starved[0].device} without a slot for some of its "
            "experts: give a larger --budget, or fewer --devices"
        )

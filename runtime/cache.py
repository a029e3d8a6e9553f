"""States, slots and pins of all keys. It keeps the books; what to do with them is the controller's business."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice

import numpy as np

from artifacts.replicas import FULL_BITS
from artifacts.shape import Shape
from runtime.plan import Place
from runtime.pools import Pool

ABSENT, LOADING, RESIDENT = 0, 1, 2


class Scope(StrEnum):
    """Where a newcomer may take its slot: from its own layer's share, or from anywhere."""

    LAYER = "layer"
    GLOBAL = "global"


class Cache:
    """Every key belongs to one of `pools`, which come in the order of their keys and cover them.

    `shares` by key, of an expert; `shadows` [L * E]: bits of the replica of each expert that stays beside the slots, if
    any does; `near_bits` [L * E]: those at which it is computed near. `state` and `pinned` are views for whoever wants
    many keys at once. One key at a time is read and written in the bytes below them, which takes a tenth of the time.
    """

    def __init__(
        self,
        shape: Shape,
        pools: Sequence[Pool],
        *,
        shares: Sequence[float] | None = None,
        shadows: np.ndarray | None = None,
    ) -> None:
        self.shape, self.pools, self.shadows = shape, pools, shadows
        self.near_bits = np.full(shape.num_keys, FULL_BITS)
        self.num_keys = pools[-1].stop
        self._shares = shares or [1.0] * self.num_keys
        self.states, self._pins = bytearray(self.num_keys), bytearray(self.num_keys)
        self.state, self.pinned = np.frombuffer(self.states, np.uint8), np.frombuffer(self._pins, bool)
        self.places: list[Place | None] = [None] * self.num_keys  # of what is not absent
        self.pool_of = [number for number, pool in enumerate(pools) for _ in range(pool.first, pool.stop)]  # by key
        self._views = [(self.state[p.first : p.stop], self.pinned[p.first : p.stop], p.first) for p in pools]
        self._free_slots = self._all_slots()
        self.num_slots = int(sum(pool.num_slots for pool in pools))
        self._first_passing = next((pool.first for pool in pools if pool.is_passing), self.num_keys)
        self._passing: dict[int, None] = {}  # what is in such a pool, the longest untouched first

    def layer_states(self, layer: int) -> np.ndarray:
        """[E] states of one layer, a view."""
        first = layer * self.shape.num_experts
        return self.state[first : first + self.shape.num_experts]

    def room(self, key: int) -> int:
        """Empty slots in the pool of `key`."""
        return len(self._free_slots[self.pool_of[key]])

    def num_slots_for(self, key: int) -> int:
        """Slots of its pool, empty or not."""
        return self.pools[self.pool_of[key]].num_slots

    def candidates(self, key: int) -> np.ndarray:
        """What may leave the pool of `key`: resident and not pinned, ascending."""
        state, pinned, first = self._views[self.pool_of[key]]
        loose = ((state == RESIDENT) > pinned).nonzero()[0]
        return loose + first if first else loose

    def is_passing(self, key: int) -> bool:
        return key >= self._first_passing

    def touch(self, keys: Iterable[int]) -> None:
        """These are in use: of what passes, they leave last."""
        if self._passing:
            for key in keys:
                if key in self._passing:
                    self._passing[key] = self._passing.pop(key)

    def oldest(self, count: int) -> list[int]:
        """Up to `count` of what passes and may leave, the longest untouched first."""
        leaving = (key for key in self._passing if self.states[key] == RESIDENT and not self._pins[key])
        return list(islice(leaving, count))

    def pin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._pins[key] = True

    def unpin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._pins[key] = False

    def admit(self, key: int, state: int, bits: int = FULL_BITS) -> Place:
        """Give `key`, a replica of so many bits, an empty slot of its pool; it takes a whole one at any precision."""
        free = self._free_slots[self.pool_of[key]]
        assert not self.states[key] and free, f"no room for key {key} in state {self.states[key]}"
        self.states[key] = state
        if key >= self._first_passing:
            self._passing[key] = None
        self.places[key] = place = Place(key, free.pop(), bits, self._shares[key])
        return place

    def evict(self, keys: Iterable[int]) -> None:
        for key in keys:
            assert self.states[key] and not self._pins[key], f"key {key} cannot leave"
            self._free_slots[self.pool_of[key]].append(self.places[key].slot)
            self.states[key], self.places[key] = ABSENT, None
            if key >= self._first_passing:
                del self._passing[key]

    def clear(self) -> None:
        """Everything absent, nothing pinned: whatever had been begun when a step failed is undone with it."""
        self.pinned[:] = False
        self.state[:] = ABSENT
        self.places[:] = [None] * self.num_keys
        self._free_slots = self._all_slots()
        self._passing.clear()

    def _all_slots(self) -> list[list[int]]:
        """By pool, the first one last, which is taken first."""
        ends = np.cumsum([pool.num_slots for pool in self.pools]).tolist()
        return [list(range(end - 1, end - pool.num_slots - 1, -1)) for pool, end in zip(self.pools, ends, strict=True)]

    def validate(self) -> None:
        """Raise AssertionError unless every slot is held once or free, in the pool of its key, and nothing is pinned,
        as it is between steps."""
        places, start = [place for place in self.places if place], 0
        for number, (pool, free) in enumerate(zip(self.pools, self._free_slots, strict=True)):
            held = [place.slot for place in places if self.pool_of[place.key] == number]
            assert sorted(held + free) == list(range(start, start + pool.num_slots)), "a slot is lost or held twice"
            start += pool.num_slots
        held = np.flatnonzero(self.state != ABSENT).tolist()
        assert [place.key for place in places] == held, "a key has a place and is absent, or has none and is not"
        assert not self.pinned.any(), f"{np.flatnonzero(self.pinned).tolist()} are pinned and nobody computes on them"
        passing = [key for key in held if self.is_passing(key)]
        assert sorted(self._passing) == passing, f"{passing} pass, and {list(self._passing)} are known to"

"""States, slots and pins of all keys. It keeps the books; what to do with them is the controller's business."""

from collections.abc import Iterable
from enum import StrEnum

import numpy as np

from artifacts.replicas import FULL_BITS
from artifacts.shape import Shape
from runtime.plan import Place

ABSENT, LOADING, RESIDENT = 0, 1, 2


class Scope(StrEnum):
    """Where a newcomer may take its slot: from its own layer's share, or from anywhere."""

    LAYER = "layer"
    GLOBAL = "global"


class Cache:
    """`capacities` [L] slots of each layer in layer scope; in global scope only their sum counts.

    `shadows` [L * E]: bits of the replica of each expert that stays beside the slots, if any does; `near_bits` [L * E]:
    those at which it is computed near. `state` and `pinned` [L * E] are views for whoever wants many keys at once. One
    key at a time is read and written in the bytes below them, which takes a tenth of the time.
    """

    def __init__(
        self, shape: Shape, capacities: np.ndarray, scope: Scope, *, shadows: np.ndarray | None = None
    ) -> None:
        self.shape, self.scope, self.capacities = shape, scope, capacities
        self.shadows = shadows
        self.near_bits = np.full(shape.num_keys, FULL_BITS)
        self.states, self._pins = bytearray(shape.num_keys), bytearray(shape.num_keys)
        self.state, self.pinned = np.frombuffer(self.states, np.uint8), np.frombuffer(self._pins, bool)
        self.places: list[Place | None] = [None] * shape.num_keys  # of what is not absent
        is_global = scope is Scope.GLOBAL
        self._room = [int(capacities.sum())] if is_global else [int(capacity) for capacity in capacities]
        self.stride = shape.num_keys if is_global else shape.num_experts
        shares = range(0, shape.num_keys, self.stride)
        self._views = [(self.state[i : i + self.stride], self.pinned[i : i + self.stride]) for i in shares]
        self._free_slots = list(range(int(capacities.sum()) - 1, -1, -1))
        self.num_slots = len(self._free_slots)

    def layer_states(self, layer: int) -> np.ndarray:
        """[E] states of one layer, a view."""
        first = layer * self.shape.num_experts
        return self.state[first : first + self.shape.num_experts]

    def room(self, key: int) -> int:
        """Empty slots in the scope of `key`."""
        return self._room[key // self.stride]

    def candidates(self, key: int) -> np.ndarray:
        """What may leave the scope of `key`: resident and not pinned, ascending."""
        scope = key // self.stride
        state, pinned = self._views[scope]
        loose = ((state == RESIDENT) > pinned).nonzero()[0]
        return loose + scope * self.stride if scope else loose

    def pin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._pins[key] = True

    def unpin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._pins[key] = False

    def admit(self, key: int, state: int, bits: int = FULL_BITS) -> Place:
        """Give `key`, a replica of so many bits, an empty slot of its scope; it takes a whole one at any precision."""
        scope = key // self.stride
        assert not self.states[key] and self._room[scope] > 0, f"no room for key {key} in state {self.states[key]}"
        self._room[scope] -= 1
        self.states[key] = state
        self.places[key] = place = Place(key, self._free_slots.pop(), bits)
        return place

    def evict(self, keys: Iterable[int]) -> None:
        for key in keys:
            assert self.states[key] and not self._pins[key], f"key {key} cannot leave"
            self._free_slots.append(self.places[key].slot)
            self._room[key // self.stride] += 1
            self.states[key], self.places[key] = ABSENT, None

    def clear(self) -> None:
        """Everything absent, nothing pinned."""
        self.pinned[:] = False
        self.evict(np.flatnonzero(self.state != ABSENT).tolist())

    def validate(self) -> None:
        """Raise AssertionError unless every slot is held once or free, and room agrees with both."""
        places = [place for place in self.places if place]
        slots = [place.slot for place in places] + self._free_slots
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
        assert sum(self._room) == len(self._free_slots) and min(self._room) >= 0, "room disagrees with the free slots"
        held = np.flatnonzero(self.state != ABSENT).tolist()
        assert [place.key for place in places] == held, "a key has a place and is absent, or has none and is not"

"""States, slots and pins of all keys. It keeps the books; what to do with them is the controller's business."""

from enum import StrEnum

import numpy as np

from artifacts.shape import Shape
from runtime.plan import FULL_BITS

ABSENT, LOADING, RESIDENT = 0, 1, 2
NO_SLOT = -1


class Scope(StrEnum):
    """Where a newcomer may take its slot: from its own layer's share, or from anywhere."""

    LAYER = "layer"
    GLOBAL = "global"


class Cache:
    """`capacities` [L] slots of each layer in layer scope; in global scope only their sum counts."""

    def __init__(self, shape: Shape, capacities: np.ndarray, scope: Scope) -> None:
        self.shape, self.scope = shape, scope
        self.state = np.zeros(shape.num_keys, np.uint8)
        self.slot = np.full(shape.num_keys, NO_SLOT, np.int32)
        self.bits = np.zeros(shape.num_keys, np.uint8)  # precision of what is there
        self.pinned = np.zeros(shape.num_keys, bool)
        is_global = scope is Scope.GLOBAL
        self._room = np.array([capacities.sum()] if is_global else capacities, np.int64)
        self.stride = shape.num_keys if is_global else shape.num_experts
        self._free_slots = list(range(int(capacities.sum()) - 1, -1, -1))
        self.num_slots = len(self._free_slots)

    def layer_states(self, layer: int) -> np.ndarray:
        """[E] states of one layer, a view."""
        first = layer * self.shape.num_experts
        return self.state[first : first + self.shape.num_experts]

    def room(self, key: int) -> int:
        """Empty slots in the scope of `key`."""
        return int(self._room[key // self.stride])

    def candidates(self, key: int) -> np.ndarray:
        """What may leave the scope of `key`: resident and not pinned, ascending."""
        first = key // self.stride * self.stride
        scope = slice(first, first + self.stride)
        return np.flatnonzero((self.state[scope] == RESIDENT) & ~self.pinned[scope]) + first

    def admit(self, key: int, state: int, bits: int = FULL_BITS) -> int:
        """Give `key`, a replica of so many bits, an empty slot of its scope; it takes a whole one at any precision."""
        assert self.state[key] == ABSENT and self.room(key) > 0, f"no room for key {key} in state {self.state[key]}"
        slot = self._free_slots.pop()
        self._room[key // self.stride] -= 1
        self.state[key], self.slot[key], self.bits[key] = state, slot, bits
        return slot

    def evict(self, key: int) -> None:
        assert self.state[key] != ABSENT and not self.pinned[key], f"key {key} cannot leave"
        self._free_slots.append(int(self.slot[key]))
        self._room[key // self.stride] += 1
        self.state[key], self.slot[key] = ABSENT, NO_SLOT

    def clear(self) -> None:
        """Everything absent, nothing pinned."""
        self.pinned[:] = False
        for key in np.flatnonzero(self.state != ABSENT).tolist():
            self.evict(key)

    def validate(self) -> None:
        """Raise AssertionError unless every slot is held once or free, and room agrees with both."""
        held = np.flatnonzero(self.state != ABSENT)
        slots = self.slot[held].tolist() + self._free_slots
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
        assert self._room.sum() == len(self._free_slots) and (self._room >= 0).all(), (
            "room disagrees with the free slots"
        )
        assert (self.slot[self.state == ABSENT] == NO_SLOT).all(), "an absent key holds a slot"

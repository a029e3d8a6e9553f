"""Holds the state, slot and pin of every key; the controller decides what to do with them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from artifacts.shape import FULL_BITS, Shape
from runtime.control.plan import Place
from runtime.control.pools import Partitions, Pool
from runtime.policies.base import Residents, Step
from runtime.policies.step import most_wanted

ABSENT = 0
LOADING = 1
RESIDENT = 2
_NO_BITS: Mapping[int, int] = {}


class Cache:
    """Every key belongs to one of `pools`, which are ordered by their keys, then by device, and
    cover all keys.

    `first_passing` is the first key of passing pools, which come last; `free_slots` has the empty
    slots of each pool. `is_one_pool` says that one pool has all keys of a layer.
    `shares` by key: the part of an expert that the key stands for. `shadows` [L * E]: bits of each
    expert's resident replica, if there are such replicas. `near_bits` [L * E]: bits at which an
    expert is computed in the near tier. `state` and `pinned` are numpy views for callers that read
    many keys at once. Single keys are read and written in the byte arrays below the views, `states`
    and `pins`, which takes a tenth of the time.
    """

    def __init__(
        self,
        shape: Shape,
        pools: Sequence[Pool],
        *,
        shares: Sequence[float] | None = None,
        shadows: np.ndarray | None = None,
        partitions: Partitions | None = None,
    ) -> None:
        self.shape = shape
        self.pools = pools
        self.shadows = shadows
        self.partitions = partitions or Partitions(shape.num_experts)
        self.near_bits = np.full(shape.num_keys, FULL_BITS)
        self.num_keys = pools[-1].stop
        self._shares = shares or [1.0] * self.num_keys
        self.states = bytearray(self.num_keys)
        self.pins = bytearray(self.num_keys)
        self.state = np.frombuffer(self.states, np.uint8)
        self.pinned = np.frombuffer(self.pins, bool)
        self.places: list[Place | None] = [None] * self.num_keys  # by key, None while it is absent
        keys = [self.partitions.keys(pool) for pool in pools]
        self.pool_of = [0] * self.num_keys  # by key
        for number, own in enumerate(keys):
            for key in own.tolist():
                self.pool_of[key] = number
        self._views = [
            (*map(self._view_of(pool), (self.state, self.pinned)), own)
            for pool, own in zip(pools, keys, strict=True)
        ]
        self.is_one_pool = self.partitions.count == 1 and self.num_keys == shape.num_keys
        self.free_slots = self._all_slots()
        self.num_slots = int(sum(pool.num_slots for pool in pools))
        self.first_passing = next((pool.first for pool in pools if pool.is_passing), self.num_keys)
        self._passing: dict[int, None] = {}  # keys of passing pools, the least recently used first

    def layer_states(self, layer: int) -> np.ndarray:
        """Return a view of the states [E] of one layer."""
        first = layer * self.shape.num_experts
        return self.state[first : first + self.shape.num_experts]

    def _view_of(self, pool: Pool) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that takes values [L * E] and returns a view of those of a pool's keys,
        ascending."""
        num_experts = self.shape.num_experts
        count = self.partitions.count
        layers = slice(pool.first // num_experts, pool.stop // num_experts)
        return lambda values: values.reshape(-1, num_experts)[layers, pool.device :: count]

    def by_pool(self, keys: list[int]) -> list[list[int]]:
        """Group keys of one layer by pool."""
        groups: dict[int, list[int]] = {}
        for key in keys:
            groups.setdefault(self.pool_of[key], []).append(key)
        return [groups[number] for number in sorted(groups)]

    def loading(self, keys: list[int]) -> list[int]:
        """Return those of `keys` that are in flight."""
        states = self.states
        return [key for key in keys if states[key] == LOADING]

    def is_whole(self, layer: int) -> bool:
        """Return whether every expert of a layer is resident."""
        first = layer * self.shape.num_experts
        num_experts = self.shape.num_experts
        return self.states.count(RESIDENT, first, first + num_experts) == num_experts

    def of_device(self, device: int) -> dict[str, int]:
        """Return the slots of a device, their bytes and the number of its resident keys. `hops` is
        0 on the device that also computes everything but experts, else 1."""
        pools = [pool for pool in self.pools if pool.device == device]
        resident = np.flatnonzero(self.state == RESIDENT)
        return {
            "hops": int(device > 0),
            "slots": sum(pool.num_slots for pool in pools),
            "slot_bytes": sum(pool.num_slots * pool.slot_nbytes for pool in pools),
            "resident": int(np.count_nonzero(self.partitions.of(resident) == device)),
        }

    def num_free(self, layer: int) -> tuple[int, ...]:
        """Return the number of empty slots of a layer's scope on each device."""
        first = layer * self.shape.num_experts
        if self.partitions.count == 1:
            return (self.room(first),)
        return tuple([self.room(first + device) for device in range(self.partitions.count)])

    def room(self, key: int) -> int:
        """Return the number of empty slots in the pool of `key`."""
        return len(self.free_slots[self.pool_of[key]])

    def candidates(self, key: int) -> np.ndarray:
        """Return the keys that may be evicted from the pool of `key`, resident and not pinned,
        ascending."""
        state, pinned, keys = self._views[self.pool_of[key]]
        found = ((state == RESIDENT) > pinned).ravel().nonzero()[0]
        return found if len(keys) == self.num_keys else keys[found]

    def touch(self, keys: Iterable[int]) -> None:
        """Mark keys of passing pools as used: they are evicted last."""
        if self._passing:
            for key in keys:
                if key in self._passing:
                    self._passing[key] = self._passing.pop(key)

    def oldest(self, pool_key: int, count: int) -> list[int]:
        """Return up to `count` evictable keys of a passing key's pool, the least recently used
        first."""
        states = self.states
        pins = self.pins
        pool_of = self.pool_of
        pool = pool_of[pool_key]
        leaving = (
            k for k in self._passing if states[k] == RESIDENT and not pins[k] and pool_of[k] == pool
        )
        return list(islice(leaving, count))

    def unpin(self, keys: Iterable[int]) -> None:
        pins = self.pins
        for key in keys:
            pins[key] = False

    def admit(self, keys: list[int], state: int, bits: Mapping[int, int] = _NO_BITS) -> list[Place]:
        """Give each of `keys`, all of one pool, an empty slot for a replica of its `bits`, by
        default at full precision; a replica takes a whole slot at any precision."""
        free = self.free_slots[self.pool_of[keys[0]]] if keys else []
        states = self.states
        places = self.places
        shares = self._shares
        admitted = []
        for key in keys:
            assert not states[key] and free, f"no room for key {key} in state {states[key]}"
            states[key] = state
            places[key] = place = Place(
                key, free.pop(), bits.get(key, FULL_BITS) if bits else FULL_BITS, shares[key]
            )
            admitted.append(place)
        if keys and keys[0] >= self.first_passing:
            self._passing.update(dict.fromkeys(keys))
        return admitted

    def admit_all(self) -> list[Place]:
        """Make every absent key resident, where there is a slot for each."""
        by_pool: dict[int, list[int]] = {}
        for key, state in enumerate(self.states):
            if not state:
                by_pool.setdefault(self.pool_of[key], []).append(key)
        return [place for keys in by_pool.values() for place in self.admit(keys, RESIDENT)]

    def rearrange(self, keys: Sequence[int]) -> None:
        """Hold these keys and no others, one for each slot, below 0 for none; all are resident, and
        none is pinned."""
        self.clear()
        for slot, key in enumerate(keys):
            if key >= 0:
                self.states[key], self.places[key] = (
                    RESIDENT,
                    Place(key, slot, FULL_BITS, self._shares[key]),
                )
        self.free_slots = [[slot for slot in free if keys[slot] < 0] for free in self.free_slots]

    def evict(self, keys: Iterable[int]) -> None:
        for key in keys:
            assert self.states[key] and not self.pins[key], f"key {key} cannot leave"
            self.free_slots[self.pool_of[key]].append(self.places[key].slot)
            self.states[key] = ABSENT
            self.places[key] = None
            if key >= self.first_passing:
                del self._passing[key]

    def clear(self) -> None:
        """Make everything absent and unpinned, which also undoes what a failed step had begun."""
        self.pinned[:] = False
        self.state[:] = ABSENT
        self.places[:] = [None] * self.num_keys
        self.free_slots = self._all_slots()
        self._passing.clear()

    def _all_slots(self) -> list[list[int]]:
        """Return the slots of every pool, the first one last, because slots are popped from the
        end."""
        ends = np.cumsum([pool.num_slots for pool in self.pools]).tolist()
        return [
            list(range(end - 1, end - pool.num_slots - 1, -1))
            for pool, end in zip(self.pools, ends, strict=True)
        ]

    def validate(self) -> None:
        """Raise AssertionError unless every slot is free or held once, in the pool of its key, and
        no key is pinned. Call it between steps."""
        places = [place for place in self.places if place]
        start = 0
        for number, (pool, free) in enumerate(zip(self.pools, self.free_slots, strict=True)):
            held = [place.slot for place in places if self.pool_of[place.key] == number]
            assert sorted(held + free) == list(range(start, start + pool.num_slots)), (
                "a slot is lost or held twice"
            )
            strangers = [
                place.key for place in places if start <= place.slot < start + pool.num_slots
            ]
            strangers = [key for key in strangers if self.partitions.of(key) != pool.device]
            assert not strangers, f"{strangers} are not of device {pool.device}"
            start += pool.num_slots
        held = np.flatnonzero(self.state != ABSENT).tolist()
        assert [place.key for place in places] == held, (
            "a key has a place and is absent, or has none and is not"
        )
        assert not self.pinned.any(), (
            f"{np.flatnonzero(self.pinned).tolist()} are pinned and nobody computes on them"
        )
        passing = [key for key in held if key >= self.first_passing]
        assert sorted(self._passing) == passing, (
            f"{passing} pass, and {list(self._passing)} are known to"
        )


class StepResidents(Residents):
    """The states of one step's experts, as the controller shows them to a miss policy.

    Compares states only when a policy reads them; the step's missing experts are known beforehand.

    `states` [E] is a view of the cache; `missing` are the absent experts of `selected` [T, K];
    `busy` and `room` as in `Residents`.
    """

    __slots__ = ("_missing", "_selected", "_states")

    def __init__(
        self,
        states: np.ndarray,
        num_free: Sequence[int],
        selected: np.ndarray,
        missing: list[int],
        *,
        busy: float,
        room: float,
    ) -> None:
        self._states = states
        self.num_free = num_free
        self.busy = busy
        self.room = room
        self._selected = selected
        self._missing = missing

    @property
    def resident(self) -> np.ndarray:
        return self._states == RESIDENT

    @property
    def absent(self) -> np.ndarray:
        return self._states == ABSENT

    def missing(self, step: Step) -> list[int]:
        if step.selected is not self._selected:
            return super().missing(step)
        return most_wanted(self._missing, step.selected)

"""Chooses victims, waves and prefetches and tracks when they arrive, all in the state of the cache;
no weight moves here."""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from runtime.control.cache import ABSENT, LOADING, RESIDENT, Cache
from runtime.control.counters import Counter, Counters
from runtime.control.ordering import first_leaving, first_of, queues
from runtime.control.plan import Place, Wave
from runtime.control.pools import Pool
from runtime.control.segments import Segments, Whole
from runtime.policies.base import Eviction, Now, Split

_key = attrgetter("key")
_bits = attrgetter("bits")
# Looked up once: enum access is slow.
_EVICTIONS = Counter.EVICTIONS
_PREFETCHES = Counter.PREFETCHES
_DEMAND_BYTES = Counter.DEMAND_BYTES
_PREFETCH_BYTES = Counter.PREFETCH_BYTES
_WASTED_BYTES = Counter.WASTED_BYTES


@dataclass(slots=True)
class _Arrival:
    """The bytes of a key that the link still has to move."""

    key: int
    remaining: int


class Arrivals:
    """`window`: bytes that are moved per step; `lent`: further bytes of this step. `queue` is empty
    when nothing is in flight."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.lent = 0
        self.queue: deque[_Arrival] = deque()
        self._backlog = 0  # bytes still to be moved

    @property
    def room(self) -> int:
        """Bytes of this step that no transfer has claimed yet; negative when more than that is in
        flight."""
        return self.window + self.lent - self._backlog

    @property
    def in_flight(self) -> int:
        """Bytes still to be moved of the transfer in flight, which demand loads go behind."""
        return self.queue[0].remaining if self.queue else 0

    def send(self, key: int, nbytes: int) -> None:
        self.queue.append(_Arrival(key, nbytes))
        self._backlog += nbytes

    def drain(self) -> list[int]:
        """Move this step's bytes and return the keys that have arrived."""
        budget = self.window + self.lent
        landed = []
        while self.queue and budget > 0:
            arrival = self.queue[0]
            moved = min(budget, arrival.remaining)
            arrival.remaining -= moved
            budget -= moved
            self._backlog -= moved
            if not arrival.remaining:
                landed.append(arrival.key)
                self.queue.popleft()
        return landed

    def latest(self) -> list[int]:
        """Return the keys in flight, the last issued first."""
        return [arrival.key for arrival in reversed(self.queue)]

    def remove(self, keys: Container[int]) -> None:
        """Remove keys whose remaining bytes are waited for or cancelled."""
        self.queue = deque(arrival for arrival in self.queue if arrival.key not in keys)
        self._backlog = sum([arrival.remaining for arrival in self.queue])

    def validate(self) -> None:
        """Raise AssertionError unless the counted bytes are those in flight."""
        coming = sum([arrival.remaining for arrival in self.queue])
        assert coming == self._backlog, (
            f"{coming} bytes are to come, and {self._backlog} are counted"
        )

    def clear(self) -> None:
        """Cancel everything in flight."""
        self.queue.clear()
        self._backlog = 0


class Mover:
    """Serves the controller's steps: evicts by an eviction policy, and prefetches within `window`
    bytes a step and those `lent`. `now` and `counters` are the controller's; `unused` has keys that
    were prefetched and not used yet, `evicted_in_pass` the pass in which each key last left, -1 for
    none."""

    def __init__(
        self,
        cache: Cache,
        *,
        eviction: Eviction,
        window: int,
        nbytes: Mapping[int, int],
        pieces: Whole | Segments,
        now: Now,
        counters: Counters,
    ) -> None:
        self.cache = cache
        self.arrivals = Arrivals(window)
        self._eviction = eviction
        self._nbytes = nbytes
        self._expert_nbytes = cache.shape.expert_nbytes
        self._pieces = pieces
        self._now = now
        self._counters = counters
        # Only for a policy that is compiled anyhow, because numba takes long to import. The
        # compiled loop needs keys without gaps, as on one device.
        is_compiled = eviction.ranks is not None and cache.partitions.count == 1
        self._first_leaving = first_leaving() if is_compiled else None
        self._queues = queues(eviction, cache)
        self.evicted_in_pass = [-1] * cache.num_keys
        self.unused: set[int] = set()
        # by layer placed anew: the keys wanted resident, until all are or are in flight
        self._wanted: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Empty the tier and cancel everything in flight; which keys were evicted in which pass
        stays known."""
        self.arrivals.clear()
        self.unused.clear()
        self._wanted.clear()
        self.cache.clear()

    def lay_out(self, split: Split, pools: Sequence[Pool]) -> None:
        """Cut experts by another split, into empty slots; prefetched keys that were not used count
        as wasted."""
        self._waste(self.unused)
        self.clear()
        self._pieces.cut(split)
        self.cache = Cache(
            self.cache.shape, pools, shares=self._pieces.shares, partitions=self.cache.partitions
        )

    def validate(self) -> None:
        """Raise AssertionError when, between steps, the state contradicts itself."""
        self.cache.validate()
        self.arrivals.validate()
        loading = np.flatnonzero(self.cache.state == LOADING).tolist()
        coming = sorted(arrival.key for arrival in self.arrivals.queue)
        assert coming == loading, f"{loading} are loading, and {coming} are on their way"
        absent = [key for key in self.unused if not self.cache.states[key]]
        assert not absent, f"{absent} count as prefetched and not used yet, and are absent"

    # Demand

    def waves(
        self, present: list[int], missing: list[int], bits: Mapping[int, int]
    ) -> tuple[tuple[Wave, ...], list[int]]:
        """Load the missing keys: in one wave if they fit beside those `present`, else in as many as
        it takes. Returns the waves, and the keys that stay pinned until the end of the step."""
        if self.unused or self.arrivals.queue:
            self._arrive(present)
        cache = self.cache
        pins = cache.pins
        for key in present:
            pins[key] = True
        resident = tuple(map(cache.places.__getitem__, present))
        if not missing:
            return ((Wave(resident, ()),) if present else ()), present
        pinned = present
        waves = []
        while True:
            loads = self._load_wave(missing, bits)
            pinned = pinned + list(map(_key, loads))
            if pinned:
                waves.append(Wave(() if waves else resident, tuple(loads)))
            if len(loads) == len(missing):
                return tuple(waves), pinned
            missing = [key for key in missing if not cache.states[key]]
            assert pinned, f"layer {self._now.layer} has no slot at all"
            cache.unpin(pinned)
            pinned = []

    def settle(self, keys: list[int]) -> tuple[Wave, ...]:
        """Return the wave of keys that are all resident, while nothing is in flight. None is
        pinned, as nothing is evicted."""
        if self.unused:
            self.unused.difference_update(keys)
        places = self.cache.places
        return (Wave(tuple([places[key] for key in keys]), ()),) if keys else ()

    def _arrive(self, keys: list[int]) -> None:
        """Make keys in flight resident: the step waits for them before it computes."""
        if self.unused:
            self.unused.difference_update(keys)
        if self.arrivals.queue and (late := self.cache.loading(keys)):
            self._land(late)

    def _land(self, keys: list[int]) -> None:
        for key in keys:
            self.cache.states[key] = RESIDENT
        self.arrivals.remove(keys)

    def _load_wave(self, missing: list[int], bits: Mapping[int, int]) -> list[Place]:
        """Return demand loads for as many keys as fit their pools; each is pinned. Residents leave
        for them by the policy, then prefetches are cancelled, the last issued first."""
        cache = self.cache
        pins = cache.pins
        counters = self._counters
        loads = []
        for keys in (missing,) if cache.is_one_pool else cache.by_pool(missing):
            number = cache.pool_of[keys[0]]
            keys = keys[: cache.pools[number].num_slots]
            room = len(cache.free_slots[number])
            if (count := len(keys) - room) > 0:
                victims = self._victims(keys[0], count)
                if len(victims) < count:
                    victims = victims + self._cancel(keys[0], count - len(victims))
                self._leave(victims)
                keys = keys[: room + len(victims)]
            admitted = cache.admit(keys, RESIDENT, bits)
            if bits:
                nbytes = sum(map(self._nbytes.__getitem__, map(_bits, admitted)))
            elif self._pieces.is_cut:
                nbytes = self._pieces.num_bytes(keys)
            else:
                nbytes = len(keys) * self._expert_nbytes
            for key in keys:
                pins[key] = True
            counters.add(_DEMAND_BYTES, self._now.layer, nbytes)
            if counters.is_spread:
                counters.spread(_DEMAND_BYTES, keys[:1], nbytes)
            loads += admitted
        return loads

    # Eviction

    def _victims(self, pool_key: int, count: int) -> list[int]:
        """Return up to `count` evictable residents of a key's pool."""
        cache = self.cache
        if pool_key >= cache.first_passing:
            return cache.oldest(pool_key, count)
        if self._queues:
            states = cache.states
            pins = cache.pins
            found = []
            for key in self._queues[cache.pool_of[pool_key]]:
                if states[key] == RESIDENT and not pins[key]:
                    found.append(key)
                    if len(found) == count:
                        break
            return found
        if self._first_leaving is not None:
            pool = cache.pools[cache.pool_of[pool_key]]
            victims = np.empty(count, np.int64)
            num_victims = self._first_leaving(
                *self._eviction.ranks, cache.state, cache.pinned, pool.first, pool.stop, victims
            )
            return victims[:num_victims].tolist()
        candidates = cache.candidates(pool_key)
        return (
            first_of(candidates, self._eviction.order(candidates, self._now), count)
            if candidates.size
            else []
        )

    def _cancel(self, pool_key: int, count: int) -> list[int]:
        """Cancel up to `count` prefetches of a pool."""
        pool_of = self.cache.pool_of
        pins = self.cache.pins
        latest = [
            key
            for key in self.arrivals.latest()
            if pool_of[key] == pool_of[pool_key] and not pins[key]
        ]
        if keys := latest[:count]:
            self.arrivals.remove(keys)
        return keys

    def _leave(self, keys: list[int]) -> None:
        if not keys:
            return
        pass_index = self._now.pass_index
        for key in keys:
            self.evicted_in_pass[key] = pass_index
        counters = self._counters
        counters.add(_EVICTIONS, self._now.layer, len(keys))
        if counters.is_spread:
            counters.spread(_EVICTIONS, keys)
        self.cache.evict(keys)
        if self.unused and not self.unused.isdisjoint(keys):
            self._waste(self.unused.intersection(keys))

    def _waste(self, keys: set[int]) -> None:
        if keys:
            self._counters.add(_WASTED_BYTES, self._now.layer, self._pieces.num_bytes(keys))
            self.unused.difference_update(keys)

    # Prefetch

    def prefetch(self, proposed: np.ndarray) -> tuple[Place, ...]:
        """Send for the proposed keys, best first, while the step has bytes left; none of the
        proposed keys is evicted for another."""
        room = self.arrivals.room
        if room <= 0:
            return ()
        keys = proposed.tolist()
        if self._pieces.is_cut:
            keys = self._pieces.of(keys)
        states = self.cache.states
        coming = [key for key in keys if not states[key]]
        loads = self._send_within(coming, keys, room) if coming else ()
        if loads:
            self._note_prefetched(loads)
        return tuple(loads)

    def _send_within(self, coming: list[int], keys: list[int], room: int) -> list[Place]:
        """Send for the absent keys `coming` of `keys`, best first, while `room` bytes last; skip
        those without a slot. Their pools' victims are chosen once, for all that may come."""
        cache = self.cache
        num_bytes = self._pieces.num_bytes
        loads = []
        # by pool, an iterator of victims
        states = cache.states
        leaving = {}
        for key in coming:
            if room <= 0:
                break
            if states[key]:  # proposed twice
                continue
            if not cache.room(key):
                pool = cache.pool_of[key]
                if pool not in leaving:
                    leaving[pool] = iter(self._make_way(coming, keys, key, room))
                if (victim := next(leaving[pool], None)) is None:
                    continue
                self._leave([victim])
            nbytes = num_bytes((key,))
            loads.append(self._send(key, nbytes))
            room -= nbytes
        return loads

    def _make_way(self, coming: list[int], keys: list[int], key: int, room: int) -> list[int]:
        """Return victims in the pool of `key` for the keys `coming` into it, as many as `room`
        bytes need; none of `keys`."""
        cache = self.cache
        states = self.cache.states
        most = len(keys)
        if not self._pieces.is_cut:  # all keys have the same size
            most = -(-room // self._pieces.num_bytes((key,)))
        if most > 1:
            pool_of = cache.pool_of
            most = min(
                most,
                sum([not states[other] and pool_of[other] == pool_of[key] for other in coming]),
            )
        return self._victims_sparing(keys, key, most)

    def _victims_sparing(self, keys: list[int], pool_key: int, count: int) -> list[int]:
        """Return up to `count` victims in the pool of `pool_key`, none of them in `keys`."""
        states = self.cache.states
        pins = self.cache.pins
        spared = [key for key in keys if states[key] and not pins[key]]
        for key in spared:
            pins[key] = True
        victims = self._victims(pool_key, count)
        for key in spared:
            pins[key] = False
        return victims

    def _send(self, key: int, nbytes: int) -> Place:
        """Put a key, for which there is room, in flight."""
        self.arrivals.send(key, nbytes)
        return self.cache.admit([key], LOADING)[0]

    def _note_prefetched(self, loads: list[Place]) -> None:
        self.unused.update(keys := [load.key for load in loads])
        self._eviction.prefetched(self._pieces.tops(keys), self._now)
        counters = self._counters
        layer = self._now.layer
        counters.add(_PREFETCHES, layer, len(keys))
        counters.add(_PREFETCH_BYTES, layer, self._pieces.num_bytes(keys))
        if counters.is_spread:
            counters.spread(_PREFETCHES, keys)
            for key in keys:
                counters.spread(_PREFETCH_BYTES, [key], self._pieces.num_bytes([key]))

    def end_step(self, pinned: list[int]) -> None:
        """Unpin what the step used, evict what is not to stay resident, and move the step's share
        of bytes."""
        pins = self.cache.pins
        for key in pinned:
            pins[key] = False
        if self._wanted:
            self._leave_unwanted(self._now.layer)
        if self.arrivals.queue:
            for key in self.arrivals.drain():
                self.cache.states[key] = RESIDENT

    # Placement

    def want(self, layer: int, keys: list[int]) -> None:
        """Set the keys that are to be resident in a layer; all others of the layer are to be
        evicted."""
        self._wanted[layer] = keys

    def place(self, layer: int, *, at_once: bool = False) -> tuple[Place, ...]:
        """Make room for the keys that are wanted in this layer and send for them, step by step
        until all are resident or in flight. What the step has pinned leaves at its end, and its
        slot is filled at the layer's next step. With `at_once`, before anything is pinned, what is
        sent for counts as resident from now on."""
        self._leave_unwanted(layer)
        coming = [key for key in self._wanted.get(layer, ()) if self.cache.states[key] == ABSENT]
        placed = [
            self._send(key, self._pieces.num_bytes([key])) for key in coming if self.cache.room(key)
        ]
        if len(placed) == len(coming):
            self._wanted.pop(layer, None)
        if placed:
            self._note_prefetched(placed)
        if placed and at_once:
            self._land([place.key for place in placed])
        return tuple(placed)

    def _leave_unwanted(self, layer: int) -> None:
        """Evict the residents of a layer placed anew that are neither wanted nor pinned."""
        if layer not in self._wanted:
            return
        cache = self.cache
        num_experts = cache.shape.num_experts
        others = set(range(layer * num_experts, (layer + 1) * num_experts)).difference(
            self._wanted[layer]
        )
        self._leave(
            [key for key in sorted(others) if cache.states[key] == RESIDENT and not cache.pins[key]]
        )

"""The only caller of policies. It asks them in one fixed order and turns a step into a plan; it never touches a weight.

The order: residency, which may place experts anew; routing policy; states of the wanted; miss policy; victims for what
must come; waves; prefetches within their bytes. Everything here follows from ids, scores and step numbers, so that a
live run and a replay of its trace decide alike.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from artifacts.replicas import FULL_BITS
from runtime.arrivals import Arrivals
from runtime.cache import ABSENT, LOADING, RESIDENT, Cache
from runtime.counters import AT_BITS, Counter, Counters
from runtime.ordering import distinct, first_of
from runtime.plan import NO_SLOT, Place, Plan, Wave
from runtime.policies.base import (
    Choice,
    Eviction,
    Miss,
    Now,
    Prefetch,
    Residency,
    Residents,
    Routing,
    Split,
    Step,
)
from runtime.pools import Pool
from runtime.segments import Segments, Whole

_NO_BITS: Mapping[int, int] = {}
_NO_KEYS = np.zeros(0, np.int64)
_AT_BITS = {bits: Counter[name.upper()] for bits, name in AT_BITS.items()}


class Controller:
    """`window`: bytes that prefetching may move per step, besides what a miss policy lends; a prefetch is resident once
    its own have gone by.

    `nbytes`: what one expert weighs, by bits. `pieces` says what of an expert lies by itself: states, slots, pins and
    counters are those of the pieces, while policies speak of experts all the same.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        routing: Routing,
        eviction: Eviction,
        miss: Miss,
        prefetch: Prefetch,
        residency: Residency,
        window: int,
        nbytes: Mapping[int, int],
        pieces: Whole | Segments,
    ) -> None:
        self.cache, self.shape, self.nbytes = cache, cache.shape, nbytes
        self._routing, self._eviction, self._miss, self._prefetch = routing, eviction, miss, prefetch
        self._residency = residency
        self._capacities = residency.capacities(cache.num_slots, self.shape)
        self._picks_bits = "replicas" in miss.requires
        self._pieces = pieces
        self.now = Now()
        self.counters = Counters(self.shape.num_layers)
        self._arrivals = Arrivals(window)
        self._evicted_in_pass = [-1] * cache.num_keys
        self._unused_prefetch: set[int] = set()
        self._to_place: dict[int, list[int]] = {}  # by layer
        self._near_places: dict[int, Place] = {}  # by key, made once
        self.num_predicted = prefetch.distance if prefetch.reads_predictions else 0  # layers ahead, per step
        self.num_learned = prefetch.distance if prefetch.reads_learned else 0
        self.sees_embeddings = any(axis.sees_embeddings for axis in (routing, eviction, miss, prefetch, residency))
        has_more = residency.cuts or residency.places or routing.reroutes
        has_more |= self.sees_embeddings or bool(prefetch.distance)  # who learns maps sees every step
        chooses = miss.every_step or self._picks_bits
        self.holds_all = cache.num_slots == self.shape.num_keys and not (has_more or chooses)
        self.holds_low = not cache.num_slots and miss.reads_shadows and not has_more
        self._low = [self._low_place(key) for key in range(self.shape.num_keys)] if self.holds_low else []

    def begin_pass(self, num_tokens: int) -> None:
        """A pass over so many tokens comes next."""
        self.now.pass_index += 1
        self.now.num_tokens += num_tokens
        self.counters.begin_pass()

    def step(self, step: Step) -> Plan:
        """Decide one layer of the current pass."""
        self.now.step += 1
        self.now.layer = layer = step.layer
        weights = None
        if self._residency.places:
            self._observe(step)
        if self._routing.reroutes:
            step = self._reroute(step)
            weights = step.weights
        num_experts, states, pieces = self.shape.num_experts, self.cache.states, self._pieces
        first = layer * num_experts
        experts = [first + expert for expert in distinct(step.selected)]
        used = pieces.of(experts)
        absent = [key for key in used if not states[key]]
        self._count(layer, used, absent)
        selected, missing, near, low, behind, bits = step.selected, absent, (), (), (), _NO_BITS
        self._arrivals.lent = 0
        if self._miss.every_step or absent and self._miss.chooses:
            choice = self._choose(step, absent)
            if choice.selected is not selected:
                selected = choice.selected
                experts = [first + expert for expert in distinct(selected)]
                used = pieces.of(experts)
                absent = [key for key in used if not states[key]]
            near = tuple([self._near_place(key) for key in used if key % num_experts in choice.near])
            low = tuple([self._low_place(key) for key in used if key % num_experts in choice.low])
            elsewhere = choice.near | choice.low if choice.low else choice.near
            missing = [key for key in absent if key % num_experts not in elsewhere]
            behind = [first + expert for expert in choice.behind]
            bits = {first + expert: precision for expert, precision in choice.bits.items()}
            weights = weights if choice.weights is None else choice.weights
            self._arrivals.lent = int(choice.lent * self.nbytes[FULL_BITS])
        if missing and self._picks_bits:
            self._eviction.fetched({key: bits.get(key, FULL_BITS) for key in missing}, self.now)
        self._eviction.used(experts, step, self.now)
        if pieces.is_cut:
            self.cache.touch(used)
        here = [key for key in used if states[key]] if absent else used
        if near or low:
            here = [key for key in here if key % num_experts not in elsewhere]
        waves, pinned = self._waves(here, missing, bits)
        prefetches = self._place(layer) if layer in self._to_place else ()
        if self._prefetch.distance or behind:
            prefetches += self._prefetches(step, behind)
        self.cache.unpin(pinned)
        if self._arrivals.queue:
            self.cache.state[self._arrivals.drain()] = RESIDENT
        if len(self.nbytes) > 1:
            self._count_bits(layer, [*near, *low, *(place for w in waves for place in (*w.resident, *w.loads))])
        return Plan(layer, selected, weights, waves, near, low, prefetches)

    def settled(self, layer: int, experts: list[int]) -> list[Place]:
        """Where one token's experts are where nothing is left to decide: the tier holds all, these among them, or none
        but the replicas that stay.

        Empty if one is still absent. A short cut: `step` would count the same, and nothing ever leaves.
        """
        assert self.holds_all or self.holds_low, "only where nothing is left to decide"
        first, there = layer * self.shape.num_experts, self._low or self.cache.places
        places = [place for expert in experts if (place := there[first + expert])]
        if len(places) < len(experts):
            return []
        self.count_settled(layer)
        if self.holds_low:
            self._count_bits(layer, places)
        return places

    def count_settled(self, layer: int) -> None:
        """One token's requests of a layer, all of them hits, or all computed on what stays."""
        self.now.step += 1
        self.now.layer = layer
        for counter in (Counter.REQUESTS, *((Counter.MISSES, Counter.LOW) if self.holds_low else (Counter.HITS,))):
            self.counters.table[counter, layer] += self.shape.top_k

    def is_whole(self, layer: int) -> bool:
        """Whether every expert of a layer is there."""
        first, num_experts = layer * self.shape.num_experts, self.shape.num_experts
        return self.cache.states.count(RESIDENT, first, first + num_experts) == num_experts

    def forget(self) -> None:
        """Start again with an empty cache, as after a step that failed; counters and history stay."""
        self._arrivals.queue.clear()
        self._unused_prefetch.clear()
        self._to_place.clear()
        self.cache.clear()

    def lay_out(self, split: Split, pools: Sequence[Pool]) -> None:
        """Cut experts by another split, into slots that are empty; counters and history stay. Between passes."""
        wasted = self._pieces.num_bytes(self._unused_prefetch)
        if wasted:
            self.counters.add(Counter.WASTED_BYTES, self.now.layer, wasted)
        self.forget()
        self._pieces.cut(split)
        self._near_places.clear()
        self.cache = Cache(self.shape, pools, shares=self._pieces.shares)

    def validate(self) -> None:
        """Raise AssertionError where, between steps, the books contradict each other."""
        self.cache.validate()
        loading = np.flatnonzero(self.cache.state == LOADING).tolist()
        coming = sorted(arrival.key for arrival in self._arrivals.queue)
        assert coming == loading, f"{loading} are loading, and {coming} are on their way"
        absent = [key for key in self._unused_prefetch if not self.cache.states[key]]
        assert not absent, f"{absent} count as prefetched and not used yet, and are absent"
        self.counters.validate()

    def _reroute(self, step: Step) -> Step:
        routed = self._routing.route(step, self._pieces.layer_states(self.cache.state, step.layer) == RESIDENT)
        is_own = (routed.selected[:, :, None] == step.selected[:, None, :]).any(axis=2)
        self.counters.add(Counter.REPLACED_RANKS, step.layer, int((~is_own).sum()))
        return routed

    def _choose(self, step: Step, absent: list[int]) -> Choice:
        """What the miss policy makes of the step, counted."""
        num_experts = self.shape.num_experts
        first, states = step.layer * num_experts, self._pieces.layer_states(self.cache.state, step.layer)
        choice = self._miss.choose(step, Residents(states == RESIDENT, states == ABSENT, self.cache.room(first)))
        near, low = (sum([key % num_experts in chosen for key in absent]) for chosen in (choice.near, choice.low))
        add, spared = self.counters.add, 0
        if choice.selected is not step.selected:
            served, experts = set(choice.selected.ravel().tolist()), [key % num_experts for key in absent]
            spared = sum(expert not in served and not choice.is_elsewhere(expert) for expert in experts)
            dropped = int((choice.selected < 0).sum())
            add(Counter.SPARED, step.layer, spared)
            add(Counter.DROPPED_RANKS, step.layer, dropped)
            add(Counter.REPLACED_RANKS, step.layer, int((choice.selected != step.selected).sum()) - dropped)
        add(Counter.FETCHED, step.layer, -near - low - spared)  # `_count` took all that is absent for fetched
        add(Counter.NEAR, step.layer, near)
        add(Counter.LOW, step.layer, low)
        return choice

    def _near_place(self, key: int) -> Place:
        place = self._near_places.get(key)
        if place is None:
            bits = int(self.cache.near_bits[key % self.shape.num_keys])
            self._near_places[key] = place = Place(key, NO_SLOT, bits, self._pieces.shares[key])
        return place

    def _low_place(self, key: int) -> Place:
        return Place(key, NO_SLOT, int(self.cache.shadows[key]))

    def _count_bits(self, layer: int, places: list[Place]) -> None:
        for place in places:
            if place.bits != FULL_BITS:
                self.counters.add(_AT_BITS[place.bits], layer, 1)

    def _count(self, layer: int, wanted: list[int], absent: list[int]) -> None:
        add = self.counters.add
        late = sum([self.cache.states[key] == LOADING for key in wanted]) if self._arrivals.queue else 0
        add(Counter.REQUESTS, layer, len(wanted))
        add(Counter.HITS, layer, len(wanted) - late - len(absent))
        if late:
            add(Counter.LATE, layer, late)
        if absent:
            add(Counter.MISSES, layer, len(absent))
            add(Counter.FETCHED, layer, len(absent))
            pass_index, evicted = self.now.pass_index, self._evicted_in_pass
            collisions = sum([evicted[key] == pass_index for key in absent])
            if collisions:
                add(Counter.COLLISIONS, layer, collisions)

    def _waves(
        self, here: list[int], missing: list[int], bits: Mapping[int, int]
    ) -> tuple[tuple[Wave, ...], list[int]]:
        """Fit the missing in: in one wave if they can share the tier with what is here, else in as many as it takes."""
        self._arrive(here)
        self.cache.pin(here)
        places = self.cache.places
        resident = tuple([places[key] for key in here])
        if not missing:
            return ((Wave(resident, ()),) if here else ()), here
        pinned, waves = here, []
        while True:
            loads, missing = self._load_wave(missing, bits)
            pinned = pinned + [load.key for load in loads]
            if pinned:
                waves.append(Wave(() if waves else resident, loads))
            if not missing:
                return tuple(waves), pinned
            assert pinned, f"layer {self.now.layer} has no slot at all"
            self.cache.unpin(pinned)
            pinned = []

    def _arrive(self, keys: list[int]) -> None:
        """The step waits for what is on its way, so it is there when the step computes."""
        if self._unused_prefetch:
            self._unused_prefetch.difference_update(keys)
        if not self._arrivals.queue:
            return
        late = {key for key in keys if self.cache.states[key] == LOADING}
        if late:
            self.cache.state[list(late)] = RESIDENT
            self._arrivals.remove(late)

    def _load_wave(self, missing: list[int], bits: Mapping[int, int]) -> tuple[tuple[Place, ...], list[int]]:
        """Demand loads for what fits its pool, and what is still missing."""
        loads = []
        for keys in self._pieces.by_pool(missing):
            loads += self._load_some(keys, bits)
        rest = [key for key in missing if not self.cache.pinned[key]] if len(loads) < len(missing) else []
        return tuple(loads), rest

    def _load_some(self, missing: list[int], bits: Mapping[int, int]) -> list[Place]:
        """Demand loads for as many of `missing`, all of one pool, as there is room for; each is pinned."""
        missing = missing[: self.cache.num_slots_for(missing[0])]
        short = len(missing) - self.cache.room(missing[0])
        if short > 0:
            self._evict(missing[0], short)
        coming = missing[: self.cache.room(missing[0])]
        loads = [self.cache.admit(key, RESIDENT, bits.get(key, FULL_BITS)) for key in coming]
        self.cache.pin(coming)
        nbytes = sum([self.nbytes[load.bits] for load in loads]) if bits else self._pieces.num_bytes(coming)
        self.counters.add(Counter.DEMAND_BYTES, self.now.layer, nbytes)
        return loads

    def _evict(self, pool_key: int, count: int) -> None:
        """Make `count` slots in a key's pool: residents by the policy, then prefetches, the last issued first."""
        victims = self._victims(pool_key, count)
        if len(victims) < count:
            victims = victims + self._cancel(pool_key, count - len(victims))
        self._leave(victims)

    def _victims(self, pool_key: int, count: int) -> list[int]:
        """Up to `count` residents of a key's pool that may leave."""
        if self.cache.is_passing(pool_key):
            return self.cache.oldest(count)
        candidates = self.cache.candidates(pool_key)
        return first_of(candidates, self._eviction.order(candidates, self.now), count) if candidates.size else []

    def _cancel(self, pool_key: int, count: int) -> list[int]:
        """Take up to `count` prefetches of a pool off the queue."""
        pool_of, pinned = self.cache.pool_of, self.cache.pinned
        latest = [key for key in self._arrivals.latest() if pool_of[key] == pool_of[pool_key] and not pinned[key]]
        if keys := latest[:count]:
            self._arrivals.remove(keys)
        return keys

    def _leave(self, keys: list[int]) -> None:
        self.cache.evict(keys)
        for key in keys:
            self._evicted_in_pass[key] = self.now.pass_index
        self.counters.add(Counter.EVICTIONS, self.now.layer, len(keys))
        if wasted := self._unused_prefetch.intersection(keys):
            self._unused_prefetch -= wasted
            self.counters.add(Counter.WASTED_BYTES, self.now.layer, self._pieces.num_bytes(wasted))

    def _observe(self, step: Step) -> None:
        """Show the residency policy the step; where it places a layer anew, note what is to be there."""
        self._residency.observe(step)
        placement = self._residency.place(step, int(self._capacities[step.layer]))
        if placement is not None:
            first = step.layer * self.shape.num_experts
            self.cache.near_bits[first : first + self.shape.num_experts] = placement.near_bits
            self._near_places.clear()
            self._to_place[step.layer] = (first + placement.resident).tolist()

    def _place(self, layer: int) -> tuple[Place, ...]:
        """Make room for what is to be in this layer and send for it, until it is all there or on its way."""
        states, wanted = self.cache.states, self._to_place[layer]
        first = layer * self.shape.num_experts
        others = set(range(first, first + self.shape.num_experts)).difference(wanted)
        self._leave([key for key in sorted(others) if states[key] == RESIDENT and not self.cache.pinned[key]])
        coming = [key for key in wanted if not states[key]]
        placed = self._send(coming[: self.cache.room(first)])
        if len(placed) == len(coming):
            del self._to_place[layer]
        self._note_prefetched([place.key for place in placed])
        return tuple(placed)

    def _prefetches(self, step: Step, behind: Sequence[int]) -> tuple[Place, ...]:
        """Bring what the policies propose while the link has bytes left; meanwhile none of it is evicted."""
        proposed = self._prefetch.propose(step, self.now) if self._prefetch.distance else _NO_KEYS
        if behind:
            proposed = np.concatenate((behind, proposed))
        if self._pieces.is_cut:
            proposed = np.array(self._pieces.of(proposed.tolist()), np.int64)
        states, pinned = self.cache.states, self.cache.pinned
        keys = proposed.tolist()
        absent = [key for key in keys if not states[key]]
        if not absent:
            return ()
        kept = [key for key in keys if states[key] and not pinned[key]]
        self.cache.pin(kept)
        loads = self._send_within(absent)
        self.cache.unpin(kept)
        self._note_prefetched([load.key for load in loads])
        return tuple(loads)

    def _send_within(self, keys: list[int]) -> list[Place]:
        """Put absent `keys` on their way, best first, while the link has bytes left and room can be made."""
        loads: list[Place] = []
        leaving: dict[int, Iterator[int]] = {}  # by pool, chosen once for all that may come
        room = self._arrivals.room
        for key in keys:
            if room <= 0:
                break
            if self.cache.states[key]:  # proposed twice
                continue
            if not self.cache.room(key):
                pool = self.cache.pool_of[key]
                if pool not in leaving:
                    coming = sum([self.cache.pool_of[own] == pool for own in keys])
                    if not self._pieces.is_cut:  # all are as large: no more than this
                        coming = min(coming, -(-room // self._pieces.num_bytes([key])))
                    leaving[pool] = iter(self._victims(key, coming))
                if (victim := next(leaving[pool], None)) is None:
                    continue
                self._leave([victim])
            loads += self._send([key])
            room -= self._pieces.num_bytes([key])
        return loads

    def _send(self, keys: list[int]) -> list[Place]:
        """Put `keys`, for which there is room, on their way."""
        for key in keys:
            self._arrivals.send(key, self._pieces.num_bytes([key]))
        return [self.cache.admit(key, LOADING) for key in keys]

    def _note_prefetched(self, keys: list[int]) -> None:
        self._unused_prefetch.update(keys)
        self._eviction.prefetched(self._pieces.tops(keys), self.now)
        self.counters.add(Counter.PREFETCHES, self.now.layer, len(keys))
        self.counters.add(Counter.PREFETCH_BYTES, self.now.layer, self._pieces.num_bytes(keys))

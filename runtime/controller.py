"""The only caller of policies. It asks them in one fixed order and turns a step into a plan; it never touches a weight.

The order: routing policy; states of the wanted; miss policy; victims for what must come; waves; prefetches within their
bytes. Everything here follows from ids, scores and step numbers, so that a live run and a replay of its trace decide
alike.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.cache import ABSENT, LOADING, RESIDENT, Cache
from runtime.counters import Counter, Counters
from runtime.plan import FULL_BITS, Place, Plan, Wave
from runtime.policies.base import Choice, Eviction, Miss, Now, Prefetch, Residents, Routing, Step


@dataclass(slots=True)
class _Arrival:
    """A prefetch under way: what the link still has to bring, in logical bytes."""

    key: int
    remaining: int


def distinct(selected: np.ndarray) -> list[int]:
    """Experts in order of first appearance, scanning tokens, then ranks; dropped ranks (-1) left out."""
    return [expert for expert in dict.fromkeys(selected.ravel().tolist()) if expert >= 0]


class Controller:
    """`window` is what prefetching may move per step, in bytes: a prefetch is resident once that many bytes have gone
    by."""

    def __init__(
        self, cache: Cache, *, routing: Routing, eviction: Eviction, miss: Miss, prefetch: Prefetch, window: int
    ) -> None:
        self.cache, self.shape = cache, cache.shape
        self._routing, self._eviction, self._miss, self._prefetch = routing, eviction, miss, prefetch
        self._picks_bits = "replicas" in miss.requires
        self._window = window
        self.now = Now()
        self.counters = Counters(self.shape.num_layers)
        self._queue: deque[_Arrival] = deque()
        self._evicted_in_pass = np.full(self.shape.num_keys, -1, np.int64)
        self._unused_prefetch = np.zeros(self.shape.num_keys, bool)

    def begin_pass(self, num_tokens: int) -> None:
        """A pass over so many tokens comes next."""
        self.now.pass_index += 1
        self.now.num_tokens += num_tokens
        self.counters.begin_pass()

    def step(self, step: Step) -> Plan:
        """Decide one layer of the current pass."""
        self.now.step += 1
        self.now.layer = step.layer
        first = step.layer * self.shape.num_experts
        states = self.cache.layer_states(step.layer)
        weights = None
        if self._routing.reroutes:
            step = self._reroute(step, states)
            weights = step.weights
        wanted = distinct(step.selected)
        absent = [expert for expert in wanted if states[expert] == ABSENT]
        choice = self._choose(step, states) if absent else Choice(step.selected)
        self._count(step, wanted, states, absent, choice)
        used = distinct(choice.selected) if choice.selected is not step.selected else wanted
        near = tuple(expert for expert in used if expert in choice.near)
        here = [expert for expert in used if states[expert] != ABSENT]
        missing = [first + expert for expert in used if states[expert] == ABSENT and expert not in choice.near]
        bits = {first + expert: choice.bits[expert] for expert in used if expert in choice.bits}
        if self._picks_bits and missing:
            self._eviction.fetched({key: bits.get(key, FULL_BITS) for key in missing}, self.now)
        self._eviction.used([first + expert for expert in used], step, self.now)
        waves, pinned = self._waves(step.layer, [first + expert for expert in here], missing, bits)
        prefetches = self._prefetches(step)
        self.cache.pinned[pinned] = False
        self._drain()
        weights = weights if choice.weights is None else choice.weights
        return Plan(step.layer, choice.selected, weights, waves, near, prefetches)

    def forget(self) -> None:
        """Start again with an empty cache, as after a step that failed; counters and history stay."""
        self._queue.clear()
        self._unused_prefetch[:] = False
        self.cache.clear()

    def _reroute(self, step: Step, states: np.ndarray) -> Step:
        routed = self._routing.route(step, states == RESIDENT)
        is_own = (routed.selected[:, :, None] == step.selected[:, None, :]).any(axis=2)
        self.counters.table[Counter.REPLACED_RANKS, step.layer] += int((~is_own).sum())
        return routed

    def _choose(self, step: Step, states: np.ndarray) -> Choice:
        num_free = self.cache.room(step.layer * self.shape.num_experts)
        return self._miss.choose(step, Residents(states == RESIDENT, states == ABSENT, num_free))

    def _count(self, step: Step, wanted: list[int], states: np.ndarray, absent: list[int], choice: Choice) -> None:
        column = self.counters.table[:, step.layer]
        late = sum(states[expert] == LOADING for expert in wanted)
        column[Counter.REQUESTS] += len(wanted)
        column[Counter.HITS] += len(wanted) - late - len(absent)
        column[Counter.LATE] += late
        if not absent:
            return
        column[Counter.MISSES] += len(absent)
        used = set(choice.selected.ravel().tolist())
        near = sum(expert in choice.near for expert in absent)
        fetched = sum(expert in used and expert not in choice.near for expert in absent)
        column[Counter.NEAR] += near
        column[Counter.FETCHED] += fetched
        column[Counter.SPARED] += len(absent) - near - fetched
        dropped = int((choice.selected < 0).sum())
        column[Counter.DROPPED_RANKS] += dropped
        column[Counter.REPLACED_RANKS] += int((choice.selected != step.selected).sum()) - dropped
        keys = np.array(absent) + step.layer * self.shape.num_experts
        column[Counter.COLLISIONS] += int((self._evicted_in_pass[keys] == self.now.pass_index).sum())

    def _waves(
        self, layer: int, here: list[int], missing: list[int], bits: dict[int, int]
    ) -> tuple[tuple[Wave, ...], list[int]]:
        """Fit the missing in: in one wave if they can share the tier with what is here, else in as many as it takes."""
        self._arrive(here)
        self.cache.pinned[here] = True
        resident = tuple(Place(key, int(self.cache.slot[key]), int(self.cache.bits[key])) for key in here)
        pinned, waves = here, []
        while True:
            loads = self._load_some(missing[: self.cache.num_slots], bits)
            missing = missing[len(loads) :]
            pinned = pinned + [load.key for load in loads]
            if pinned:
                waves.append(Wave(() if waves else resident, loads))
            if not missing:
                return tuple(waves), pinned
            assert pinned, f"layer {layer} has no slot at all"
            self.cache.pinned[pinned] = False
            pinned = []

    def _arrive(self, keys: list[int]) -> None:
        """The step waits for what is on its way, so it is there when the step computes."""
        self._unused_prefetch[keys] = False
        if not self._queue:
            return
        late = {key for key in keys if self.cache.state[key] == LOADING}
        if late:
            self.cache.state[list(late)] = RESIDENT
            self._queue = deque(arrival for arrival in self._queue if arrival.key not in late)

    def _load_some(self, missing: list[int], bits: dict[int, int]) -> tuple[Place, ...]:
        """Demand loads for as many of `missing`, all of one layer, as there is room for; each is pinned."""
        if not missing:
            return ()
        short = len(missing) - self.cache.room(missing[0])
        if short > 0:
            self._evict(missing[0], short)
        loads = []
        for key in missing[: self.cache.room(missing[0])]:
            precision = bits.get(key, FULL_BITS)
            loads.append(Place(key, self.cache.admit(key, RESIDENT, precision), precision))
            self.cache.pinned[key] = True
        nbytes = sum(load.nbytes(self.shape.expert_nbytes) for load in loads)
        self.counters.table[Counter.DEMAND_BYTES, self.now.layer] += nbytes
        return tuple(loads)

    def _evict(self, scope_key: int, count: int) -> None:
        """Make `count` slots in the scope of a key: residents as the policy orders them, then prefetches, the last
        issued first."""
        candidates = self.cache.candidates(scope_key)
        order = np.lexsort(self._eviction.order(candidates, self.now)[::-1]) if candidates.size else []
        victims = candidates[order[:count]].tolist() if candidates.size else []
        for victim in victims + self._cancel(scope_key, count - len(victims)):
            self._leave(victim)

    def _cancel(self, scope_key: int, count: int) -> list[int]:
        """Take up to `count` prefetches of a scope off the queue."""
        scope = scope_key // self.cache.stride
        latest = [arrival for arrival in reversed(self._queue) if arrival.key // self.cache.stride == scope]
        keys = [arrival.key for arrival in latest if not self.cache.pinned[arrival.key]][: max(count, 0)]
        self._queue = deque(arrival for arrival in self._queue if arrival.key not in keys) if keys else self._queue
        return keys

    def _leave(self, key: int) -> None:
        self.cache.evict(key)
        self._evicted_in_pass[key] = self.now.pass_index
        column = self.counters.table[:, self.now.layer]
        column[Counter.EVICTIONS] += 1
        column[Counter.WASTED_BYTES] += self.shape.expert_nbytes * int(self._unused_prefetch[key])
        self._unused_prefetch[key] = False

    def _prefetches(self, step: Step) -> tuple[Place, ...]:
        """Bring what the policy proposes while the link has bytes left; what it proposes is kept from eviction
        meanwhile."""
        if not self._prefetch.distance:
            return ()
        proposed = self._prefetch.propose(step, self.now)
        kept = proposed[(self.cache.state[proposed] != ABSENT) & ~self.cache.pinned[proposed]]
        self.cache.pinned[kept] = True
        loads: list[Place] = []
        backlog = sum(arrival.remaining for arrival in self._queue)
        for key in proposed[self.cache.state[proposed] == ABSENT].tolist():
            if backlog >= self._window:
                break
            if not self._make_room(key):
                continue
            loads.append(Place(key, self.cache.admit(key, LOADING)))
            self._queue.append(_Arrival(key, self.shape.expert_nbytes))
            backlog += self.shape.expert_nbytes
        self.cache.pinned[kept] = False
        self._note_prefetched([load.key for load in loads])
        return tuple(loads)

    def _make_room(self, key: int) -> bool:
        if self.cache.room(key):
            return True
        if self.cache.candidates(key).size:
            self._evict(key, 1)
        return self.cache.room(key) > 0

    def _note_prefetched(self, keys: list[int]) -> None:
        self._unused_prefetch[keys] = True
        self._eviction.prefetched(keys, self.now)
        self.counters.table[Counter.PREFETCHES, self.now.layer] += len(keys)
        self.counters.table[Counter.PREFETCH_BYTES, self.now.layer] += len(keys) * self.shape.expert_nbytes

    def _drain(self) -> None:
        """Let one window of bytes go by."""
        budget = self._window
        while self._queue and budget > 0:
            arrival = self._queue[0]
            moved = min(budget, arrival.remaining)
            arrival.remaining -= moved
            budget -= moved
            if not arrival.remaining:
                self.cache.state[arrival.key] = RESIDENT
                self._queue.popleft()

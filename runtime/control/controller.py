"""Asks policies in one fixed order and turns a step into a plan; it never touches a weight.

The order: residency policy, which may place experts anew; routing policy; states of the wanted
experts; miss policy; victims for what is loaded; waves; prefetches within their bytes. Before the
first step of a pass a prefetch policy may propose too. `runtime/control/transfers.py` chooses
victims and waves and tracks what is in flight. Every decision follows from ids, scores and step
numbers, so that a live run and a replay of its trace decide alike.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from artifacts.shape import FULL_BITS
from artifacts.traces.trace import DECODE
from runtime.control.cache import RESIDENT, Cache, StepResidents
from runtime.control.counters import Counter, Counters
from runtime.control.plan import NO_SLOT, Place, Plan, Wave
from runtime.control.pools import Pool
from runtime.control.segments import Segments, Whole
from runtime.control.transfers import Mover
from runtime.policies.base import (
    Choice,
    Eviction,
    Miss,
    Now,
    Opening,
    Prefetch,
    Residency,
    Routing,
    Split,
    Step,
)
from runtime.policies.shared.misses import keep_sum

_NO_BITS: Mapping[int, int] = {}
_NO_KEYS = np.zeros(0, np.int64)
# looked up once: enum access is slow
_FETCHED = Counter.FETCHED
_NEAR = Counter.NEAR
_LOW = Counter.LOW


class Controller:
    """`window`: bytes that prefetches may move per step, besides the bytes that a miss policy
    lends; a prefetched key is resident once its bytes have been moved.

    `nbytes`: size of one expert, by bits. `pieces` says which parts of an expert are keys of their
    own: states, slots, pins and counters are per piece, while policies speak of whole experts.
    """

    mover_kind = Mover
    _placed: tuple[Place, ...] = ()  # what a placement sends for at the beginning of this step

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
        self.shape = cache.shape
        self.nbytes = nbytes
        self._routing = routing
        self._eviction = eviction
        self._miss = miss
        self._prefetch = prefetch
        self._residency = residency
        self._pieces = pieces
        self._picks_bits = "replicas" in miss.requires
        if residency.places:
            self._capacities = cache.partitions.dealt(
                residency.capacities(cache.num_slots, self.shape)
            )  # [L, N]
        self.now = Now()
        self.counters = Counters(self.shape.num_layers, cache.partitions)
        self.mover = self.mover_kind(
            cache,
            eviction=eviction,
            window=window,
            nbytes=nbytes,
            pieces=pieces,
            now=self.now,
            counters=self.counters,
        )
        self._near_places: dict[int, Place] = {}  # by key, each made once
        self._unsettled: list[Step] = []  # of a pass with drafts, as their experts were chosen
        # layers ahead, per step
        self.num_predicted = prefetch.distance if prefetch.reads_predictions else 0
        self.num_learned = prefetch.distance if prefetch.reads_learned else 0
        self.opens_passes = prefetch.opens_passes
        self.sees_embeddings = any(
            axis.sees_embeddings for axis in (routing, eviction, miss, prefetch, residency)
        )
        has_more = residency.cuts or residency.places or routing.reroutes
        # policies that learn maps observe every step
        has_more |= self.sees_embeddings or bool(prefetch.distance)
        self._can_settle = not (prefetch.distance or residency.places or len(nbytes) > 1)
        decides = has_more or miss.every_step or self._picks_bits
        self.holds_all = cache.num_slots == self.shape.num_keys and not decides
        self.reads_shadows = miss.reads_shadows
        self.holds_low = not cache.num_slots and miss.reads_shadows and not has_more
        self._low = (
            [self._low_place(key) for key in range(self.shape.num_keys)] if self.holds_low else []
        )
        self._low_cells = self.counters.cells_of([place.bits for place in self._low])
        self._fixed = (
            Counter.REQUESTS,
            *((Counter.MISSES, _LOW) if self.holds_low else (Counter.HITS,)),
        )

    def begin_pass(self, num_tokens: int, *, num_drafts: int = 0) -> None:
        """Begin a pass over `num_tokens` tokens, of which `num_drafts` are drafts: these count as
        tokens once they are settled."""
        self.now.pass_index += 1
        self.now.num_tokens += num_tokens - num_drafts
        self.counters.begin_pass()
        self._unsettled.clear()
        if num_drafts:
            self.counters.add(Counter.DRAFTED, 0, num_drafts)

    def settle(self, accepted: np.ndarray) -> None:
        """Note which of the tokens [T] of the pass that has ended are drafts that were accepted:
        they count as tokens and their experts as used, token by token in each layer, at the pass's
        last step. Experts that only rejected drafts wanted were loaded, and are never used."""
        now = self.now
        for row in np.flatnonzero(accepted):
            now.num_tokens += 1
            for step in self._unsettled:
                now.layer = step.layer
                own = step.part(np.arange(len(accepted)) == row, DECODE)
                self._eviction.used(self._keys(own), own, now)
        self.counters.add(Counter.ACCEPTED, 0, int(accepted.sum()))
        self._unsettled.clear()

    def open_pass(self, opening: Opening) -> tuple[Place, ...]:
        """Return what is prefetched before the first layer, within the bytes of a step; if a policy
        `opens_passes`."""
        now = self.now
        now.layer = self.mover.arrivals.lent = 0
        proposed = self._prefetch.propose_first(opening, now)
        if not (len(proposed) or self.sees_embeddings):
            return ()
        now.unserved = set(range(self.shape.num_experts))
        prefetches = self.mover.prefetch(self._noted(proposed))
        now.unserved = frozenset()
        self.mover.end_step([])
        return prefetches

    @property
    def may_choose(self) -> bool:
        """True if the miss policy may choose something else than to fetch what is absent."""
        return self._miss.chooses or self._miss.every_step

    @property
    def cache(self) -> Cache:
        """The states, slots and pins of all keys."""
        return self.mover.cache

    def step(self, step: Step) -> Plan:
        """Decide one layer of the current pass."""
        now = self.now
        now.step += 1
        now.layer = layer = step.layer
        weights = None
        if self._residency.places:
            self._observe(step)
        if self._routing.reroutes:
            step = self._reroute(step)
            weights = step.weights
        experts, used, present, absent = self._wanted(layer, step.selected)
        self._count(layer, used, absent)
        self.mover.arrivals.lent = 0
        if self._miss.every_step or absent and self._miss.chooses:
            return self._decide(step, experts, used, present, absent, weights)
        if self._can_settle and not absent and not self.mover.arrivals.queue:
            return self._settle(step, weights, experts, used)
        return self._plan(step, step.selected, weights, experts, used, present, absent)

    def plan_present(
        self, layer: int, selected: np.ndarray, weights: np.ndarray, coming: Container[int]
    ) -> Plan:
        """Plan a step of a pass that drafts, with what is there: nothing is loaded, counted or
        noted. An absent expert, or one whose slot is in `coming`, is computed on its resident
        replica if it has one; else it is dropped, and a token's other experts share its weight."""
        cache = self.mover.cache
        num_experts = self.shape.num_experts
        experts, used, _, _ = self._wanted(layer, selected)
        places = [place for key in used if (place := cache.places[key])]
        ready = {
            place.key
            for place in places
            if cache.states[place.key] == RESIDENT and place.slot not in coming
        }
        missing = [key for key in experts if not ready.issuperset(self._pieces.of([key]))]
        low = ()
        others = None
        if cache.shadows is not None:
            low = tuple(map(self._low_place, missing))
        elif missing:
            absent = [key % num_experts for key in missing]
            selected = np.where(np.isin(selected, absent), -1, selected)
            others = keep_sum(weights, selected)
        here = set(self._pieces.of([key for key in experts if key not in missing]))
        waves = (Wave(tuple(place for place in places if place.key in here), ()),) if here else ()
        return Plan(layer, selected, others, waves, (), low, ())

    def _wanted(
        self, layer: int, selected: np.ndarray
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the keys of the experts in `selected` [T, K], of their pieces, of the pieces that
        are present and of those that are absent."""
        first = layer * self.shape.num_experts
        states = self.mover.cache.states
        experts = list(map(first.__add__, distinct(selected)))
        used = self._pieces.of(experts) if self._pieces.is_cut else experts
        present = []
        absent = []
        for key in used:
            (present if states[key] else absent).append(key)
        return experts, used, present, absent

    def _decide(
        self,
        step: Step,
        experts: list[int],
        used: list[int],
        present: list[int],
        absent: list[int],
        weights: np.ndarray | None,
    ) -> Plan:
        """Plan the step as the miss policy chooses: stand-ins, near and low experts, precisions of
        demand loads."""
        choice = self._choose(step, absent)
        num_experts = self.shape.num_experts
        if choice.selected is not step.selected:
            experts, used, present, absent = self._wanted(step.layer, choice.selected)
        missing = absent
        near = ()
        low = ()
        behind = ()
        bits = _NO_BITS
        first = step.layer * num_experts
        if choice.near:
            places = self._near_places
            near = tuple(
                [
                    places.get(key) or self._near_place(key)
                    for key in used
                    if key % num_experts in choice.near
                ]
            )
        if choice.low:
            low = tuple([self._low_place(key) for key in used if key % num_experts in choice.low])
        if elsewhere := choice.near | choice.low if choice.low else choice.near:
            missing = [key for key in absent if key % num_experts not in elsewhere]
            again = [key for key in present if key % num_experts in elsewhere]
            if again:
                present = [key for key in present if key not in again]
                late = self.mover.cache.loading(again)
                self.counters.add(Counter.LATE_ELSEWHERE, step.layer, len(late))
        if choice.behind:
            behind = [first + expert for expert in choice.behind]
        if choice.bits:
            bits = {first + expert: precision for expert, precision in choice.bits.items()}
        if choice.weights is not None:
            weights = choice.weights
        self.mover.arrivals.lent = int(choice.lent * self.nbytes[FULL_BITS])
        return self._plan(
            step, choice.selected, weights, experts, used, present, missing, near, low, behind, bits
        )

    def _note_used(
        self, experts: list[int], step: Step, selected: np.ndarray, missing: Sequence[int] = ()
    ) -> None:
        """Tell the eviction policy that a step uses the experts `selected` [T, K]; of what only
        drafts want, that it is loaded."""
        if step.drafted is None:
            self._eviction.used(experts, step, self.now)
            return
        if selected is not step.selected:
            step = replace(step, selected=selected)
        self._unsettled.append(step)
        own = step.part(~step.drafted, step.phase)
        if step.prompts is not None:
            own = replace(own, prompts=step.prompts[~step.drafted])
        keys = self._keys(own)
        self._eviction.used(keys, own, self.now)
        tops = self._pieces.tops([*missing])
        if loaded := [key for key in tops if key not in keys]:
            self._eviction.prefetched(loaded, self.now)

    def _keys(self, step: Step) -> list[int]:
        """Return the keys of the experts that a step selects."""
        first = step.layer * self.shape.num_experts
        return [first + expert for expert in distinct(step.selected)]

    def _settle(
        self, step: Step, weights: np.ndarray | None, experts: list[int], used: list[int]
    ) -> Plan:
        """Plan, as `_plan` does, a step that changes nothing in the cache because everything is
        resident."""
        self._note_used(experts, step, step.selected)
        if self._pieces.is_cut:
            self.mover.cache.touch(used)
        return Plan(step.layer, step.selected, weights, self.mover.settle(used), (), (), ())

    def _plan(
        self,
        step: Step,
        selected: np.ndarray,
        weights: np.ndarray | None,
        experts: list[int],
        used: list[int],
        present: list[int],
        missing: list[int],
        near: tuple[Place, ...] = (),
        low: tuple[Place, ...] = (),
        behind: Sequence[int] = (),
        bits: Mapping[int, int] = _NO_BITS,
    ) -> Plan:
        """Note the use, load what is `missing` in waves, and prefetch, keys of `behind` first."""
        mover = self.mover
        layer = step.layer
        if missing and self._picks_bits:
            self._eviction.fetched({key: bits.get(key, FULL_BITS) for key in missing}, self.now)
        self._note_used(experts, step, selected, missing)
        if self._pieces.is_cut:
            mover.cache.touch(used)
        waves, pinned = mover.waves(present, missing, bits)
        prefetches = mover.place(layer) if self._residency.places else ()
        if self._prefetch.distance or behind:
            prefetches += self._prefetches(step, behind)
        mover.end_step(pinned)
        if len(self.nbytes) > 1:
            self.counters.add_bits(
                layer, (*near, *low, *(place for w in waves for place in (*w.resident, *w.loads)))
            )
        return Plan(layer, selected, weights, waves, near, low, prefetches, placed=self._placed)

    def fixed_places(self, layer: int, experts: list[int]) -> list[Place]:
        """Return the places of one token's experts when nothing is ever evicted: the fast tier
        holds all experts, or only resident replicas. Returns an empty list while one expert is
        absent, and where one is named twice. Counts as `step` does."""
        assert self.holds_all or self.holds_low, "only where nothing is left to decide"
        first = layer * self.shape.num_experts
        held = self._low or self.cache.places
        places = [place for expert in experts if (place := held[first + expert])]
        if len(places) < len(experts) or len(set(experts)) < len(experts):
            return []
        self.count_fixed(layer, chosen=np.array([experts]) if self.counts_chosen else None)
        return places

    @property
    def counts_chosen(self) -> bool:
        """True if `count_fixed` needs to know which experts a token chose, and not only how
        many."""
        return self.holds_low or self.counters.is_spread

    def count_fixed(
        self, first: int, num_layers: int = 1, *, chosen: np.ndarray | None = None
    ) -> None:
        """Count a pass's requests of layers: all are hits, or all are computed on resident
        replicas. `chosen` [n, k] are the experts, none twice in a layer, given where
        `counts_chosen`, and where several tokens chose them."""
        self.now.step += num_layers
        self.now.layer = first + num_layers - 1
        amount = self.shape.top_k if chosen is None else chosen.shape[1]
        self.counters.add_to_layers(self._fixed, first, num_layers, amount)
        if chosen is None:
            return
        layers = np.arange(first, first + num_layers)[:, None]
        if self.holds_low:
            self.counters.add_to(self._low_cells[layers, chosen])
        if self.counters.is_spread:
            keys = (layers * self.shape.num_experts + chosen).ravel().tolist()
            self.counters.spread_requests(keys, (), keys if self.holds_low else ())

    def clear(self) -> None:
        """Empty the cache, as after a step that failed; counters and history stay."""
        self.mover.clear()

    def lay_out(self, split: Split, pools: Sequence[Pool]) -> None:
        """Cut experts by another split, into slots that are empty; counters and history stay. Call
        it between passes."""
        self.mover.lay_out(split, pools)
        self._near_places.clear()

    def by_device(self) -> list[dict[str, int]]:
        """Return each device's slots, their bytes, its number of resident keys and its counters;
        empty for one."""
        return [
            self.cache.of_device(device) | counts
            for device, counts in enumerate(self.counters.by_device())
        ]

    def validate(self) -> None:
        """Raise AssertionError when, between steps, the state contradicts itself."""
        self.mover.validate()
        self.counters.validate()

    def _observe(self, step: Step) -> None:
        """Show the step to the residency policy; if it places the layer anew, note which keys are
        to be resident."""
        self._residency.observe(step)
        placement = self._residency.place(step, self._capacities[step.layer].tolist())
        if placement is not None:
            first = step.layer * self.shape.num_experts
            self.cache.near_bits[first : first + self.shape.num_experts] = placement.near_bits
            self._near_places.clear()
            self.mover.want(step.layer, (first + placement.resident).tolist())
        self._placed = (
            self.mover.place(step.layer, at_once=True) if placement and placement.is_awaited else ()
        )

    def _reroute(self, step: Step) -> Step:
        routed = self._routing.route(
            step, self._pieces.layer_states(self.cache.state, step.layer) == RESIDENT
        )
        is_own = (routed.selected[:, :, None] == step.selected[:, None, :]).any(axis=2)
        self.counters.add(Counter.REPLACED_RANKS, step.layer, int((~is_own).sum()))
        return routed

    def _choose(self, step: Step, absent: list[int]) -> Choice:
        """Ask the miss policy about the step and count what it chose."""
        num_experts = self.shape.num_experts
        cache = self.mover.cache
        pieces = self._pieces
        experts = [key % num_experts for key in absent]
        missing = list(dict.fromkeys(experts)) if pieces.is_cut else experts
        states = pieces.layer_states(cache.state, step.layer)
        nbytes = self.nbytes[FULL_BITS]
        choice = self._miss.choose(
            step,
            StepResidents(
                states,
                cache.num_free(step.layer),
                step.selected,
                missing,
                busy=self.mover.arrivals.in_flight / nbytes,
                room=max(0.0, self.mover.arrivals.room / nbytes),
            ),
        )
        near = sum(map(choice.near.__contains__, experts)) if choice.near else 0
        low = sum(map(choice.low.__contains__, experts)) if choice.low else 0
        add = self.counters.add
        spared = 0
        if choice.selected is not step.selected:
            served = set(choice.selected.ravel().tolist())
            spared = sum(
                expert not in served and not choice.is_elsewhere(expert) for expert in experts
            )
            dropped = int((choice.selected < 0).sum())
            add(Counter.SPARED, step.layer, spared)
            add(Counter.DROPPED_RANKS, step.layer, dropped)
            add(
                Counter.REPLACED_RANKS,
                step.layer,
                int((choice.selected != step.selected).sum()) - dropped,
            )
        if elsewhere := near + low + spared:
            add(_FETCHED, step.layer, -elsewhere)  # `_count` counted everything absent as fetched
            add(_NEAR, step.layer, near)
            if low:
                add(_LOW, step.layer, low)
        return choice

    def _near_place(self, key: int) -> Place:
        bits = int(self.cache.near_bits[key % self.shape.num_keys])
        self._near_places[key] = place = Place(key, NO_SLOT, bits, self._pieces.shares[key])
        return place

    def _low_place(self, key: int) -> Place:
        return Place(key, NO_SLOT, self.cache.shadows[key].item())

    def _count(self, layer: int, wanted: list[int], absent: list[int]) -> None:
        late = self.mover.cache.loading(wanted) if self.mover.arrivals.queue else ()
        self.counters.add_requests(layer, len(wanted), num_late=len(late), num_absent=len(absent))
        if self.counters.is_spread:
            self.counters.spread_requests(wanted, late, absent)
        if absent:
            last = list(map(self.mover.evicted_in_pass.__getitem__, absent))
            if collisions := last.count(self.now.pass_index):
                self.counters.add(Counter.COLLISIONS, layer, collisions)

    def _prefetches(self, step: Step, behind: Sequence[int]) -> tuple[Place, ...]:
        """Send for what the policies propose, as far as bytes and slots allow."""
        may_skip = not (self._prefetch.follows_steps or self._eviction.follows_proposals)
        if may_skip and self.mover.arrivals.room <= 0:
            return ()
        proposed = self._proposed(step)
        return self.mover.prefetch(np.concatenate((behind, proposed)) if behind else proposed)

    def _proposed(self, step: Step) -> np.ndarray:
        return self._noted(
            self._prefetch.propose(step, self.now) if self._prefetch.distance else _NO_KEYS
        )

    def _noted(self, proposed: np.ndarray) -> np.ndarray:
        """Tell the eviction policy what is proposed, if it follows proposals."""
        if self._eviction.follows_proposals:
            self._eviction.proposed(proposed.tolist(), self.now)
        return proposed


def distinct(selected: np.ndarray) -> list[int]:
    """Return the experts in order of first appearance, scanning tokens, then ranks; dropped ranks
    (-1) are left out."""
    if len(selected) > 1:
        experts = dict.fromkeys(selected.ravel().tolist())
    else:
        (row,) = selected.tolist()
        experts = dict.fromkeys(row)
        if len(experts) == len(row) and -1 not in experts:
            return row
    experts.pop(-1, None)
    return list(experts)

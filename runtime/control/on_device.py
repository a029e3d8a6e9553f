"""Handover of a cache to a device that decides by itself, and back, so that both decide alike."""

from dataclasses import dataclass, replace

import numpy as np

from artifacts.traces.trace import DECODE
from runtime.control.controller import Controller
from runtime.control.counters import Counter, Counters
from runtime.policies import Policies
from runtime.policies.eviction.late_horizon import LateHorizon
from runtime.policies.eviction.lfu import Lfu
from runtime.policies.eviction.lru import Lru
from runtime.policies.prefetch.ahead import width
from runtime.policies.step import Now, Step

_FREE = -1
_LEAST = np.iinfo(np.int32).min + 1  # of a stamp: below it is what a free slot has
LAST_USE = "last use"
USES = "uses"
TURNS = "turns"
_KINDS = {Lru: LAST_USE, Lfu: USES, LateHorizon: TURNS}


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """Slot tables of all layers as a device needs them, int32. `table` [L, E] is the slot of each
    expert in its layer, `owner` [L, S] the expert of each slot, -1 for none in both; a layer with
    fewer than S slots has the first ones.

    `stamp` [L, E] orders experts by their last use, their uses, or the turns that a policy gives
    them; the expert with the least goes first. `unused` [L, E] is 1 for experts that were
    prefetched and not used yet.
    """

    table: np.ndarray
    owner: np.ndarray
    stamp: np.ndarray
    unused: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class TokenOnDevice:
    """A token that a device has decided: the `table` of counters of its pass, and `now` at its last
    step."""

    table: np.ndarray
    now: Now


class CacheOnDevice:
    """The controller's books of one-token steps that a device decides: on-demand loads, and in each
    layer eviction by `lru`, by `lfu` without decay, or by `late_horizon`. With `num_named` above 0
    the device also prefetches what `next_gate` names, up to `most_ahead` experts a step and none
    less probable than `least_p`; no prefetch is under way when the step ends. `kind` says what
    stamps are.

    After `hand_over` the device's clock is `clock()` during a token, and it stamps experts with
    that. With `TURNS` the host writes `turns()` before each token instead, and tells the policy by
    `learn` what tokens used. Until `take_back` the controller's cache stays what it was. `stepped`
    notes a step that the device has begun, and `count`, which may come later, its results; the
    controller then counts as if it had decided itself.
    """

    def __init__(self, controller: Controller, policies: Policies) -> None:
        self._controller = controller
        self._eviction = policies.eviction
        self._first_step = 0
        self.kind = _KINDS[type(policies.eviction)]
        shape = controller.shape
        prefetch = policies.prefetch
        self.most_ahead = (
            controller.mover.arrivals.window // shape.expert_nbytes if prefetch.distance else 0
        )
        self.num_named = width(shape, prefetch.overfetch) if prefetch.distance else 0
        self.least_p = prefetch.least if prefetch.distance else 0.0
        self.num_slots = [pool.num_slots for pool in controller.cache.pools]
        self.first_slots = np.cumsum([0, *self.num_slots[:-1]]).tolist()

    def hand_over(self) -> SlotTables:
        """Return the contents of the controller's cache between two passes, as the device takes
        them."""
        controller = self._controller
        cache = controller.cache
        shape = controller.shape
        assert not controller.mover.arrivals.queue, "a prefetch is under way between two passes"
        self._first_step = controller.now.step
        table = np.full((shape.num_layers, shape.num_experts), _FREE, np.int32)
        owner = np.full((shape.num_layers, max(self.num_slots)), _FREE, np.int32)
        for place in filter(None, cache.places):
            layer, expert = divmod(place.key, shape.num_experts)
            slot = place.slot - self.first_slots[layer]
            table[layer, expert] = slot
            owner[layer, slot] = expert
        unused = np.zeros_like(table)
        np.put(unused, [*controller.mover.unused], 1)
        return SlotTables(table, owner, self._stamps(), unused)

    def turns(self) -> np.ndarray:
        """Return the place of each expert in its layer's eviction order for the pass under way, [L,
        E] int32."""
        return self._eviction.turns(self._controller.now)

    def _stamps(self) -> np.ndarray:
        if self.kind == TURNS:
            return self.turns()
        stamps = (
            self._eviction.uses if self.kind == USES else self._eviction.last_use - self._steps()
        )
        return (
            np.maximum(stamps, _LEAST)
            .astype(np.int32)
            .reshape(self._controller.shape.num_layers, -1)
        )

    def _steps(self) -> np.ndarray:
        """Return for each key the number of the step whose stamp would be 0, [L * E]."""
        shape = self._controller.shape
        return self._first_step + np.repeat(np.arange(shape.num_layers), shape.num_experts)

    def clock(self) -> int:
        """Return the device's clock during the token whose first step comes next."""
        return self._controller.now.step - self._first_step + 1

    def stepped(self, first: int, num_layers: int = 1) -> None:
        """Note that the device has begun a token's steps of these layers; a token takes all layers
        in their order."""
        self._controller.now.step += num_layers
        self._controller.now.layer = first + num_layers - 1

    @property
    def counters(self) -> Counters:
        return self._controller.counters

    def ended(self) -> TokenOnDevice:
        """Return the token whose last layer the device has begun."""
        return TokenOnDevice(self.counters.table, replace(self._controller.now))

    def count(
        self,
        token: TokenOnDevice,
        loads: np.ndarray,
        evictions: np.ndarray,
        prefetches: np.ndarray | int = 0,
        wasted: np.ndarray | int = 0,
        collisions: np.ndarray | int = 0,
        *,
        wanted: np.ndarray,
    ) -> None:
        """Count a pass by what each layer loaded, evicted and prefetched. `wasted`: how many of the
        evicted had been prefetched and not used; `collisions`: how many of the loaded were evicted
        in the same pass; `wanted`: experts that a layer computed. All are [L], or 0."""
        shape = self._controller.shape
        table = token.table
        table[Counter.REQUESTS] += wanted
        table[Counter.HITS] += wanted - loads
        table[[Counter.MISSES, Counter.FETCHED]] += loads
        table[Counter.EVICTIONS] += evictions
        table[Counter.PREFETCHES] += prefetches
        table[Counter.COLLISIONS] += collisions
        table[Counter.DEMAND_BYTES] += loads * shape.expert_nbytes
        table[Counter.PREFETCH_BYTES] += prefetches * shape.expert_nbytes
        table[Counter.WASTED_BYTES] += wasted * shape.expert_nbytes

    def learn(self, token: TokenOnDevice, chosen: np.ndarray) -> None:
        """Tell the eviction policy what a token used, experts [L, K]; its weights stay on the
        device."""
        first_step = token.now.step - self._controller.shape.num_layers + 1
        for layer, experts in enumerate(chosen.astype(np.int64)):
            self._use(experts, replace(token.now, step=first_step + layer, layer=layer))

    def learn_accepted(self, chosen: np.ndarray) -> None:
        """Tell the eviction policy what the accepted drafts of the last pass used, experts [L, T,
        K], as `Controller.settle` does."""
        for of_token in chosen.swapaxes(0, 1):
            for layer, experts in enumerate(of_token):
                self._use(experts, replace(self._controller.now, layer=layer))

    def _use(self, experts: np.ndarray, now: Now) -> None:
        """Tell the eviction policy that a token used these experts [K] of a layer."""
        weights = np.full((1, len(experts)), np.nan, np.float32)
        step = Step(now.pass_index, DECODE, now.layer, experts[None], weights)
        keys = now.layer * self._controller.shape.num_experts + experts
        self._eviction.used(keys.tolist(), step, now)

    def take_back(self, owner: np.ndarray, stamp: np.ndarray, unused: np.ndarray) -> None:
        """Set the controller's cache to the device's state, given as in `SlotTables`."""
        first_keys = np.arange(len(owner))[:, None] * self._controller.shape.num_experts
        keys = np.where(owner >= 0, owner + first_keys, _FREE)
        if self.kind == LAST_USE:
            self._eviction.last_use[:] = stamp.reshape(-1) + self._steps()
        elif self.kind == USES:
            self._eviction.uses[:] = stamp.reshape(-1)
        of_layers = zip(keys.tolist(), self.num_slots, strict=True)
        self._controller.cache.rearrange([key for own, count in of_layers for key in own[:count]])
        self._controller.mover.unused = set(np.flatnonzero(unused).tolist())

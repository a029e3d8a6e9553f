"""Hands the cache of `lru` or `lfu` to a device that decides by itself, and takes it back, so that both decide as
one."""

from dataclasses import dataclass

import numpy as np

from runtime.control.controller import Controller
from runtime.control.counters import Counter, Counters
from runtime.policies.eviction.lfu import Lfu
from runtime.policies.eviction.lru import Lru

_FREE = -1
_BEFORE_ALL = np.iinfo(np.int32).min  # the stamp of a free slot: older than any other


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """What a device must know of every layer's slots, int32: `table` [L, E] is the slot of each expert in its layer,
    `owner` [L, S] the expert of each slot, -1 for none. For `lru` `stamp` [L, S] orders a layer's slots by their last
    use, for `lfu` `stamp` [L, E] is how often each expert was used. A layer with fewer than S slots has the first
    ones."""

    table: np.ndarray
    owner: np.ndarray
    stamp: np.ndarray


class CacheOnDevice:
    """The controller's books of one-token steps that a device decides: on-demand loads, and in each layer eviction by
    `lru`, or by `lfu` without decay, which `counts_uses`.

    After `hand_over` the device's clock is `clock()` during a token, and it stamps slots with that. Until `take_back`
    the controller's cache stays what it was. A step that the device has begun is noted by `stepped`, its loads and
    evictions by `count`, which may come later; the controller then counts as if it had decided itself.
    """

    def __init__(self, controller: Controller, eviction: Lru | Lfu) -> None:
        self._controller, self._eviction, self._first_step = controller, eviction, 0
        self.counts_uses = isinstance(eviction, Lfu)
        self.num_slots = [pool.num_slots for pool in controller.cache.pools]
        self.first_slots = np.cumsum([0, *self.num_slots[:-1]]).tolist()

    def hand_over(self) -> SlotTables:
        """What the controller's cache holds between two passes, as the device takes it."""
        controller = self._controller
        cache, shape = controller.cache, controller.shape
        self._first_step = controller.now.step
        table = np.full((shape.num_layers, shape.num_experts), _FREE, np.int32)
        owner = np.full((shape.num_layers, max(self.num_slots)), _FREE, np.int32)
        for place in filter(None, cache.places):
            layer, expert = divmod(place.key, shape.num_experts)
            slot = place.slot - self.first_slots[layer]
            table[layer, expert], owner[layer, slot] = slot, expert
        return SlotTables(table, owner, self._uses() if self.counts_uses else self._last_uses(owner))

    def _uses(self) -> np.ndarray:
        return self._eviction.uses.astype(np.int32).reshape(self._controller.shape.num_layers, -1)

    def _last_uses(self, owner: np.ndarray) -> np.ndarray:
        """When the expert of each slot was used last, in steps before the first one of the device."""
        stamp, num_experts = np.full_like(owner, _BEFORE_ALL), self._controller.shape.num_experts
        for layer, slot in zip(*np.nonzero(owner >= 0), strict=True):
            used = self._eviction.last_use[layer * num_experts + owner[layer, slot]] - self._first_step - layer
            stamp[layer, slot] = max(used, _BEFORE_ALL + 1)
        return stamp

    def clock(self) -> int:
        """What the device's clock is during the token whose first step comes next."""
        return self._controller.now.step - self._first_step + 1

    def stepped(self, first: int, num_layers: int = 1) -> None:
        """Note that the device has begun a token's steps of these layers; a token takes all layers in their order."""
        self._controller.now.step += num_layers
        self._controller.now.layer = first + num_layers - 1

    @property
    def counters(self) -> Counters:
        return self._controller.counters

    def count(self, table: np.ndarray, loads: np.ndarray, evictions: np.ndarray) -> None:
        """Count a token of the pass with this table by its loads and evictions in each layer, [L]."""
        shape = self._controller.shape
        table[Counter.REQUESTS] += shape.top_k
        table[Counter.HITS] += shape.top_k - loads
        table[[Counter.MISSES, Counter.FETCHED]] += loads
        table[Counter.EVICTIONS] += evictions
        table[Counter.DEMAND_BYTES] += loads * shape.expert_nbytes

    def take_back(self, owner: np.ndarray, stamp: np.ndarray) -> None:
        """Make the controller's cache what the device says, `owner` [L, S] and `stamp` as in `SlotTables`."""
        num_experts, keys = self._controller.shape.num_experts, []
        for layer, count in enumerate(self.num_slots):
            own = owner[layer, :count].astype(np.int64)
            own_keys = np.where(own >= 0, own + layer * num_experts, _FREE)
            if not self.counts_uses:
                is_there = own >= 0
                self._eviction.last_use[own_keys[is_there]] = self._first_step + layer + stamp[layer, :count][is_there]
            keys += own_keys.tolist()
        if self.counts_uses:
            self._eviction.uses[:] = stamp.reshape(-1)
        self._controller.cache.rearrange(keys)

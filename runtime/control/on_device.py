"""Hands the cache of `lru` to a device that decides by itself, and takes it back, so that both decide as one."""

from dataclasses import dataclass

import numpy as np

from runtime.control.controller import Controller
from runtime.control.counters import Counter, Counters
from runtime.policies.eviction.lru import Lru

_FREE = -1
_BEFORE_ALL = np.iinfo(np.int32).min  # the stamp of a free slot: older than any other


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """What a device must know of every layer's slots, int32: `table` [L, E] is the slot of each expert in its layer,
    `owner` [L, S] the expert of each slot, -1 for none; `stamp` [L, S] orders a layer's slots by their last use. A
    layer with fewer than S slots has the first ones."""

    table: np.ndarray
    owner: np.ndarray
    stamp: np.ndarray


class CacheOnDevice:
    """The controller's books of one-token steps that a device decides: on-demand loads, eviction `lru` in each layer.

    After `hand_over` the device's clock is `clock()` during a token, and it stamps slots with that. Until `take_back`
    the controller's cache stays what it was. A step that the device has begun is noted by `stepped`, its loads and
    evictions by `count`, which may come later; the controller then counts as if it had decided itself.
    """

    def __init__(self, controller: Controller, eviction: Lru) -> None:
        self._controller, self._eviction, self._first_step = controller, eviction, 0
        self.num_slots = [pool.num_slots for pool in controller.cache.pools]
        self.first_slots = np.cumsum([0, *self.num_slots[:-1]]).tolist()

    def hand_over(self) -> SlotTables:
        """What the controller's cache holds between two passes, as the device takes it."""
        controller = self._controller
        cache, shape, last_use = controller.cache, controller.shape, self._eviction.last_use
        self._first_step = controller.now.step
        table = np.full((shape.num_layers, shape.num_experts), _FREE, np.int32)
        owner = np.full((shape.num_layers, max(self.num_slots)), _FREE, np.int32)
        stamp = np.full_like(owner, _BEFORE_ALL)
        for place in filter(None, cache.places):
            layer, expert = divmod(place.key, shape.num_experts)
            slot = place.slot - self.first_slots[layer]
            table[layer, expert], owner[layer, slot] = slot, expert
            stamp[layer, slot] = max(last_use[place.key] - self._first_step - layer, _BEFORE_ALL + 1)
        return SlotTables(table, owner, stamp)

    def clock(self) -> int:
        """What the device's clock is during the token whose first step comes next."""
        return self._controller.now.step - self._first_step + 1

    def stepped(self, layer: int) -> None:
        """Note that the device has begun a token's step of this layer; a token takes all layers in their order."""
        self._controller.now.step += 1
        self._controller.now.layer = layer

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
        """Make the controller's cache what the device says, `owner` and `stamp` [L, S]."""
        controller, keys = self._controller, []
        num_experts, last_use = controller.shape.num_experts, self._eviction.last_use
        for layer, count in enumerate(self.num_slots):
            for expert, used in zip(owner[layer, :count].tolist(), stamp[layer, :count].tolist(), strict=True):
                key = layer * num_experts + expert if expert >= 0 else _FREE
                keys.append(key)
                if key >= 0:
                    last_use[key] = self._first_step + layer + used
        controller.cache.rearrange(keys)

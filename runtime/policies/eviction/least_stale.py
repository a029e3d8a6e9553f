"""Least-Stale (SpecMD): what this pass has not touched goes first, lower layers first, older uses first."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view, never_used, rank_then_last_use


@dataclass
class LeastStale(SimpleEviction):
    """A key is stale unless this pass has used or prefetched it; among the current keys the lower layer is evicted
    first too.

    `within` orders the stale keys: `ascending`, lower layers first, as published; `ahead`, layers that this pass has
    passed first, then those farthest ahead.
    """

    within: str = "ascending"

    def __post_init__(self) -> None:
        if self.within not in ("ascending", "ahead"):
            raise BadUsage(f"least_stale: within is ascending or ahead, not {self.within!r}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_layers, self._pass_index = shape.num_layers, -1
        self._layers = np.arange(shape.num_keys) // shape.num_experts
        self._stale = rank_then_last_use(self._layers, 0)
        self._current = rank_then_last_use(self._layers + shape.num_layers, 0).tolist()
        self._last_cells, self._last_use = cells_and_view(never_used(shape))
        # The rank of a current key; of the others as if `within` were ascending.
        self._rank_cells, self._ranks = cells_and_view(self._stale + self._last_use)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._begin(now)
        last_use, ranks, current, number = self._last_cells, self._rank_cells, self._current, now.step
        for key in keys:
            last_use[key] = number
            ranks[key] = current[key] + number

    def prefetched(self, keys: list[int], now: Now) -> None:
        self._begin(now)
        for key in keys:
            self._rank_cells[key] = self._current[key] + self._last_cells[key]

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        self._begin(now)
        ranks = self._ranks[keys]
        return (self._ahead(ranks, self._layers[keys], now.layer) if self.within == "ahead" else ranks,)

    def _begin(self, now: Now) -> None:
        """Let everything be stale when a pass begins."""
        if now.pass_index != self._pass_index:
            self._pass_index = now.pass_index
            np.add(self._stale, self._last_use, out=self._ranks)

    def _ahead(self, ranks: np.ndarray, layers: np.ndarray, layer: int) -> np.ndarray:
        """Return `ranks` with those of stale keys in the order of `ahead`."""
        num_layers = self._num_layers
        is_stale = ranks < rank_then_last_use(num_layers, -1)
        shift = np.where(layers <= layer, -num_layers, num_layers - 2 * layers)
        return rank_then_last_use(shift * is_stale, ranks)

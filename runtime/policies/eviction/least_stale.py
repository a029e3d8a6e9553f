"""Least-Stale (SpecMD): what this pass has neither used nor prefetched goes first, lower layers first, older uses
first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view, never_used, rank_then_last_use

_WITHIN = ("ascending", "left", "ahead")


@dataclass
class LeastStale(SimpleEviction):
    """A key is stale unless this pass has used it, or a prefetch policy has proposed it for this pass or the next
    (section 4.2). Stale keys are evicted before those of this pass, those before the next pass's, and lower layers
    first.

    `within` changes that order: `ascending` is as published in section 4.2; with `left`, layers that this pass has
    passed go before layers that it has still to run, current keys of theirs too (appendix A.3); with `ahead`, of the
    stale keys, layers that this pass has passed go first, then those farthest ahead.
    """

    follows_proposals: ClassVar[bool] = True

    within: str = "ascending"

    def __post_init__(self) -> None:
        if self.within not in _WITHIN:
            raise BadUsage(f"least_stale: within is one of {', '.join(_WITHIN)}, not {self.within!r}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_layers, self._num_experts, self._pass_index = shape.num_layers, shape.num_experts, -1
        self._layers = np.arange(shape.num_keys) // shape.num_experts
        self._stale = rank_then_last_use(self._layers, 0)
        self._current, self._next = (
            rank_then_last_use(self._layers + passes * shape.num_layers, 0).tolist() for passes in (1, 2)
        )
        self._last_cells, self._last_use = cells_and_view(never_used(shape))
        # The rank of every key as if `within` were ascending.
        self._rank_cells, self._ranks = cells_and_view(self._stale + self._last_use)
        self._of_next: list[int] = []  # keys proposed for the next pass

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._begin(now)
        last_use, ranks, current, number = self._last_cells, self._rank_cells, self._current, now.step
        for key in keys:
            last_use[key] = number
            ranks[key] = current[key] + number

    def proposed(self, keys: list[int], now: Now) -> None:
        self._begin(now)
        last_use, ranks, first_ahead = self._last_cells, self._rank_cells, (now.layer + 1) * self._num_experts
        for key in keys:
            if key < first_ahead:  # this pass has passed its layer: the next pass wants it
                ranks[key] = self._next[key] + last_use[key]
                self._of_next.append(key)
            else:
                ranks[key] = self._current[key] + last_use[key]

    def prefetched(self, keys: list[int], now: Now) -> None:
        self.proposed(keys, now)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        self._begin(now)
        ranks = self._ranks[keys]
        if self.within == "ascending":
            return (ranks,)
        return (rank_then_last_use(self._shift(ranks, self._layers[keys], now.layer), ranks),)

    def _begin(self, now: Now) -> None:
        """When a pass begins, let everything be stale but what was proposed for it."""
        if now.pass_index == self._pass_index:
            return
        np.add(self._stale, self._last_use, out=self._ranks)
        if now.pass_index == self._pass_index + 1:
            for key in self._of_next:
                self._rank_cells[key] = self._current[key] + self._last_cells[key]
        self._of_next.clear()
        self._pass_index = now.pass_index

    def _shift(self, ranks: np.ndarray, layers: np.ndarray, layer: int) -> np.ndarray:
        """Return what `within` adds to the ranks of keys of these layers, in layers."""
        num_layers = self._num_layers
        is_left = layers <= layer
        if self.within == "left":
            is_next = ranks >= rank_then_last_use(2 * num_layers, -1)
            return 2 * num_layers * (is_next | ~is_left)
        is_stale = ranks < rank_then_last_use(num_layers, -1)
        return np.where(is_left, -num_layers, num_layers - 2 * layers) * is_stale

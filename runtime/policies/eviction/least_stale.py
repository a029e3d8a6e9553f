"""Least-Stale (SpecMD): what this pass has neither used nor prefetched goes first, and of that,
what it has passed."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view, never_used, rank_then_last_use

_WITHIN = ("ahead", "left", "ascending")


@dataclass
class LeastStale(SimpleEviction):
    """A key is stale unless this pass has used it, or a prefetch policy has proposed it for this
    pass or the next (section 4.2). It is left if it comes before the execution point in the order
    of layers and experts: what this pass has passed, of the current layer all but what is still to
    be served (`Now.unserved`). What is proposed for the next pass comes after all of this one.

    `within` is the order. `ahead`, by sections 4.2 and 5.2: stale keys before current ones; of
    either, left keys first, lower layers first, then the key that is wanted last. `left`, by
    appendix A.3: left keys before all others; of either, stale ones first. `ascending`: stale keys
    before current ones; of either, lower layers first, wherever the pass is. Older uses first.
    """

    follows_proposals: ClassVar[bool] = True

    within: str = "ahead"

    def __post_init__(self) -> None:
        if self.within not in _WITHIN:
            raise BadUsage(
                f"least_stale: within is one of {', '.join(_WITHIN)}, not {self.within!r}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_layers = shape.num_layers
        self._num_experts = shape.num_experts
        self._layers = np.arange(shape.num_keys) // shape.num_experts
        self._use_cells, self._last_use = cells_and_view(never_used(shape))
        # The pass that last used each key, or that it was proposed for; -1: none.
        self._pass_cells, self._of_pass = cells_and_view(np.full(shape.num_keys, -1, np.int64))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        last_use = self._use_cells
        of_pass = self._pass_cells
        number = now.step
        pass_index = now.pass_index
        for key in keys:
            last_use[key] = number
            of_pass[key] = pass_index

    def proposed(self, keys: list[int], now: Now) -> None:
        of_pass = self._pass_cells
        first_ahead = (now.layer + 1) * self._num_experts
        for key in keys:
            is_left = key < first_ahead and key not in now.unserved
            of_pass[key] = now.pass_index + is_left  # what is left behind, the next pass wants

    def prefetched(self, keys: list[int], now: Now) -> None:
        self.proposed(keys, now)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        num_layers = self._num_layers
        of_pass = self._of_pass[keys]
        last_use = self._last_use[keys]
        is_current = of_pass >= now.pass_index
        # layers of this pass and of the next
        coming = self._layers[keys] + num_layers * (of_pass > now.pass_index)
        if self.within == "ascending":
            return (rank_then_last_use(2 * num_layers * is_current + coming, last_use),)
        is_left = coming <= now.layer
        if now.unserved:
            is_left &= np.fromiter(
                (key not in now.unserved for key in keys.tolist()), bool, len(keys)
            )
        place = np.where(is_left, coming, 3 * num_layers - 1 - coming)
        half = 2 * ~is_left + is_current if self.within == "left" else is_current
        return (rank_then_last_use(3 * num_layers * half + place, last_use),)

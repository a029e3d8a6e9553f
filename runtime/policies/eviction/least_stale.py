"""Least-Stale (SpecMD): what this pass has not touched goes first, lower layers first, older uses first."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import never_used, rank_then_last_use


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
        self._num_layers = shape.num_layers
        self._layers = np.arange(shape.num_keys) // shape.num_experts
        self._last_use = never_used(shape)
        self._last_pass = never_used(shape)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._last_use[keys] = now.step
        self._last_pass[keys] = now.pass_index

    def prefetched(self, keys: list[int], now: Now) -> None:
        self._last_pass[keys] = now.pass_index

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        is_current = self._last_pass[keys] == now.pass_index
        num_layers, layers = self._num_layers, self._layers[keys]
        if self.within == "ahead":
            ahead = np.where(layers <= now.layer, layers - num_layers, num_layers - layers)
            layers = np.where(is_current, layers, ahead)
        return (rank_then_last_use(num_layers * is_current + layers, self._last_use[keys]),)

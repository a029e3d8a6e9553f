"""Layers hold as many experts as it takes to load the fewest on demand (AdapMoE)."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from artifacts.splits.slots_by_layer import fewest_loads
from runtime.policies.base import Artefacts, SimpleResidency

_NO_CURVES = (
    "no curves are stored: every layer has the same number of slots; `moectl split` measures them"
)


@dataclass
class Allocated(SimpleResidency):
    """Uses the curves of what a layer loads with each number of slots; without curves every layer
    has the same number."""

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"loads"})

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._loads = artefacts.loads
        self._known = {}
        self.fallbacks = () if artefacts.loads is not None else (_NO_CURVES,)

    def capacities(self, num_slots: int, shape: Shape) -> np.ndarray:
        if self._loads is None or not shape.num_layers <= num_slots <= shape.num_keys:
            return super().capacities(num_slots, shape)
        if num_slots not in self._known:
            self._known[num_slots] = fewest_loads(self._loads, num_slots)
        return self._known[num_slots].copy()

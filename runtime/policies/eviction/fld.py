"""Farthest layer distance: the key whose layer comes again last goes first, older uses first."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import never_used, rank_then_last_use


@dataclass
class Fld(SimpleEviction):
    """Largest `(layer - now) mod L` first; the current layer counts as 0."""

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._last_use = never_used(shape)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._last_use[keys] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        layers_ahead = (keys // self._shape.num_experts - now.layer) % self._shape.num_layers
        return (rank_then_last_use(-layers_ahead, self._last_use[keys]),)

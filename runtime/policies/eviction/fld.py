"""Farthest layer distance: the key whose layer comes again last goes first, older uses first."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step, check_choice
from runtime.policies.eviction.shared import never_used, rank_then_last_use


@dataclass
class Fld(SimpleEviction):
    """Largest distance first; the current layer counts as 0. `distance` is `cyclic`, `(layer - now)
    mod L`, the layers that run until the key's layer does; or `absolute`, `|layer - now|`, as
    SpecMD words it (appendix B)."""

    distance: str = "cyclic"

    def __post_init__(self) -> None:
        check_choice("fld", "distance", self.distance, "cyclic", "absolute")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._last_use = never_used(shape)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._last_use[keys] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        ahead = keys // self._shape.num_experts - now.layer
        away = abs(ahead) if self.distance == "absolute" else ahead % self._shape.num_layers
        return (rank_then_last_use(-away, self._last_use[keys]),)

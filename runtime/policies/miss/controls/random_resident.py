"""Any resident expert stands in: the control of every choice of stand-ins (lossy)."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.shared.misses import beyond_free, drawn, stand_in


@dataclass
class RandomResident(Simple):
    """The stand-in is drawn evenly among the residents that the token does not use. An expert
    without one is fetched; with `fill` also an expert for which there is an empty slot."""

    seed: int = 0
    fill: bool = True

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._drawn = drawn(np.random.default_rng(self.seed), shape.num_experts)

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = beyond_free(step, residents, fill=self.fill)
        return Choice(stand_in(step.selected, missing, residents.resident, self._drawn))

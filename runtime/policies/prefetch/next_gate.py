"""Ask the router of a layer ahead about the input of this one (Pre-gated MoE, AdapMoE,
Mixtral-Offloading)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import (
    first_keys,
    keys_ahead,
    keys_named,
    named,
    predicted_ahead,
    width,
)


@dataclass
class NextGate(Simple):
    """The `top_k * overfetch` experts that router l + distance ranks highest, for every token of
    the step; with `through` those of every layer up to there, the nearest layer first. None to
    which the router gives that token a probability below `least`.

    Past the last layer the first layers of the next pass are predicted, from each request's last
    token. Experts are in falling order of the probability summed over the tokens.
    """

    reads_predictions: ClassVar[bool] = True
    follows_steps: ClassVar[bool] = False

    distance: int = 1
    overfetch: float = 1.0
    through: bool = False
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0 or not 0 <= self.least < 1:
            raise BadUsage("next_gate needs distance >= 1, overfetch > 0 and 0 <= least < 1")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._width = width(shape, self.overfetch)
        self._distances = range(1 if self.through else self.distance, self.distance + 1)
        self._firsts = first_keys(shape, self._distances)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        if len(step.selected) == 1:
            said = (
                predicted_ahead(step, self.distance, self._shape)
                if not self.through
                else step.predicted[0]
            )
            said = said[: len(self._distances)]
            return keys_named(said, self._width, self._firsts[step.layer], self.least)
        return np.concatenate([self._at(step, ahead) for ahead in self._distances])

    def _at(self, step: Step, ahead: int) -> np.ndarray:
        predicted = predicted_ahead(step, ahead, self._shape)
        return keys_ahead(step, ahead, self._shape, named(predicted, self._width, self.least))

"""Ask predictors fitted to this model about the layers ahead (ProMoE's place)."""

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
    of_interest,
    width,
)


@dataclass
class LearnedPrefetch(Simple):
    """The `top_k * overfetch` experts that the predictor of layer l + distance ranks highest, for
    every token.

    Works as `next_gate` does, with a predictor in place of the router.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"predictors"})
    reads_predictions: ClassVar[bool] = False
    reads_learned: ClassVar[bool] = True
    follows_steps: ClassVar[bool] = False

    distance: int = 1
    overfetch: float = 1.0

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0:
            raise BadUsage("learned needs distance >= 1 and overfetch > 0")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        if self.distance > shape.num_layers:
            raise BadUsage(
                f"learned looks at most {shape.num_layers} layers ahead, not {self.distance}"
            )
        self._shape = shape
        self._width = width(shape, self.overfetch)
        self._firsts = first_keys(shape, range(self.distance, self.distance + 1))

    def propose(self, step: Step, now: Now) -> np.ndarray:
        learned = of_interest(step, step.learned, self.distance, self._shape)
        if len(learned) == 1:
            return keys_named(learned, self._width, self._firsts[step.layer])
        return keys_ahead(step, self.distance, self._shape, named(learned, self._width))

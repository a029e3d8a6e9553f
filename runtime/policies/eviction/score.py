"""Lowest accumulated gate probability goes first (HybriMoE, SpecMD's score axis)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step


@dataclass
class ScoreEviction(SimpleEviction):
    """The router's probabilities of a layer's experts, summed over tokens; `decay` multiplies the sum once a pass."""

    sees_probabilities: ClassVar[bool] = True

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise BadUsage(f"score needs 0 < decay <= 1, not {self.decay}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._scores = np.zeros((shape.num_layers, shape.num_experts))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        assert step.probabilities is not None, "score runs without router probabilities"
        self._scores[step.layer] = self._scores[step.layer] * self.decay + step.probabilities.sum(axis=0)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._scores.ravel()[keys],)

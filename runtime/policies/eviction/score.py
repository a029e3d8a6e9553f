"""Lowest accumulated gate probability goes first (HybriMoE, SpecMD's score axis)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step, check_choice


@dataclass
class ScoreEviction(SimpleEviction):
    """Evicts the key with the lowest sum of the router's probabilities over tokens; `decay`
    multiplies the sums once a pass.

    `of`: `all` sums what the router gives every expert; `selected`, only what it gives the experts
    that a token selects.
    """

    sees_probabilities: ClassVar[bool] = True

    decay: float = 1.0
    of: str = "all"

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise BadUsage(f"score needs 0 < decay <= 1, not {self.decay}")
        check_choice("score", "of", self.of, "all", "selected")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._scores = np.zeros((shape.num_layers, shape.num_experts))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        assert step.probabilities is not None, "score runs without router probabilities"
        scores = self._scores[step.layer]
        scores *= self.decay
        if self.of == "all":
            scores += step.probabilities.sum(axis=0)
        else:
            np.add.at(
                scores, step.selected, np.take_along_axis(step.probabilities, step.selected, axis=1)
            )

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._scores.ravel()[keys],)

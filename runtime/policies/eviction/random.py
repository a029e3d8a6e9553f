"""Any resident may go: the control of every other eviction policy."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step


@dataclass
class Random(SimpleEviction):
    seed: int = 0

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._rng = np.random.default_rng(self.seed)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        """Uses are not noted."""

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._rng.random(len(keys)),)

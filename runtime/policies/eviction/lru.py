"""Least recently used: the key whose last use is oldest goes first."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view, never_used


@dataclass
class Lru(SimpleEviction):
    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._cells, self._last_use = cells_and_view(never_used(shape))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        cells, number = self._cells, now.step
        for key in keys:
            cells[key] = number

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._last_use[keys],)

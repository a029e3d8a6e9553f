"""Least recently used: the key whose last use is oldest goes first."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import never_used


@dataclass
class Lru(SimpleEviction):
    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._last_use = never_used(shape)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._last_use[keys] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._last_use[keys],)

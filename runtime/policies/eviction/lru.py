"""Least recently used: the key whose last use is oldest goes first."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view, never_used


@dataclass
class Lru(SimpleEviction):
    """With `stamp` `load` a prefetched key counts as used when it is sent for; with `use`, only once a step has used
    it, so that unused prefetches are evicted first."""

    stamp: str = "use"

    def __post_init__(self) -> None:
        if self.stamp not in ("use", "load"):
            raise BadUsage(f"lru: stamp is use or load, not {self.stamp!r}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._cells, self._last_use = cells_and_view(never_used(shape))

    @property
    def last_use(self) -> np.ndarray:
        """By key the number of the step that used it last, -1 for none: a view, in which it may be changed."""
        return self._last_use

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        cells, number = self._cells, now.step
        for key in keys:
            cells[key] = number

    def prefetched(self, keys: list[int], now: Now) -> None:
        if self.stamp == "load":
            cells, number = self._cells, now.step
            for key in keys:
                cells[key] = number

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._last_use[keys],)

"""Farthest next use goes first: the bound of every other eviction policy (Belady; Mattson's OPT),
in the simulator."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step


@dataclass
class Belady(SimpleEviction):
    requires: ClassVar[frozenset[str]] = frozenset({"next_use"})

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._future = artefacts.next_use
        self._next_use = artefacts.next_use.first.copy()

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        """Look up the next use of what the trace selects, whatever computed it in this step."""
        self._next_use[self._future.step_keys[now.step]] = self._future.following[now.step]

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (-self._next_use[keys],)

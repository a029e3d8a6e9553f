"""The states of one step's experts, as the controller shows them to a miss policy."""

from collections.abc import Sequence

import numpy as np

from runtime.control.cache import ABSENT, RESIDENT
from runtime.policies.base import Residents, Step
from runtime.policies.step import most_wanted


class StepResidents(Residents):
    """Compares states only when a policy reads them; the step's missing experts are known
    beforehand.

    `states` [E] is a view of the cache; `missing` are the absent experts of `selected` [T, K].
    """

    __slots__ = ("_missing", "_selected", "_states")

    def __init__(
        self, states: np.ndarray, num_free: Sequence[int], selected: np.ndarray, missing: list[int]
    ) -> None:
        self._states = states
        self.num_free = num_free
        self._selected = selected
        self._missing = missing

    @property
    def resident(self) -> np.ndarray:
        return self._states == RESIDENT

    @property
    def absent(self) -> np.ndarray:
        return self._states == ABSENT

    def missing(self, step: Step) -> list[int]:
        if step.selected is not self._selected:
            return super().missing(step)
        return most_wanted(self._missing, step.selected)

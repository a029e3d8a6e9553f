"""Prefetch the keys of the next steps, known beforehand, soonest first (the bound of prefetching,
in the simulator)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step


@dataclass
class Oracle(Simple):
    """Keys that the trace wants in the next `distance` steps, in order of next use.

    Together with `belady`, no prefetch replaces a key that is wanted sooner, so that a larger
    distance is never worse.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"next_use"})
    reads_predictions: ClassVar[bool] = False
    follows_steps: ClassVar[bool] = False

    distance: int = 32

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise BadUsage("oracle needs distance >= 1")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._step_keys = [keys.tolist() for keys in artefacts.next_use.step_keys]

    def propose(self, step: Step, now: Now) -> np.ndarray:
        coming = self._step_keys[now.step + 1 : now.step + 1 + self.distance]
        soonest_first = dict.fromkeys(key for keys in coming for key in keys)
        return np.array(list(soonest_first), np.int64)

"""No prefetching: every expert is loaded when it is wanted."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from runtime.policies.base import Now, Simple, Step


@dataclass
class NoPrefetch(Simple):
    distance: ClassVar[int] = 0
    reads_predictions: ClassVar[bool] = False

    def propose(self, step: Step, now: Now) -> np.ndarray:
        return np.empty(0, np.int64)

"""No prefetching: every expert is loaded when it is wanted."""

from dataclasses import dataclass

import numpy as np

from runtime.policies.base import Now, Simple, Step


@dataclass
class NoPrefetch(Simple):
    distance = 0

    def propose(self, step: Step, now: Now) -> np.ndarray:
        return np.empty(0, np.int64)

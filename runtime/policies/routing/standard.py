"""The router's own choice, untouched."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from runtime.policies.base import Simple, Step


@dataclass
class Standard(Simple):
    reroutes: ClassVar[bool] = False

    def route(self, step: Step, resident: np.ndarray) -> Step:
        return step

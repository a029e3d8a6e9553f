"""Every layer holds the same number of experts; what does not divide goes to the lower layers."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Simple


@dataclass
class Uniform(Simple):
    def capacities(self, num_slots: int, shape: Shape) -> np.ndarray:
        each, rest = divmod(num_slots, shape.num_layers)
        return np.array([each + (layer < rest) for layer in range(shape.num_layers)], np.int64)

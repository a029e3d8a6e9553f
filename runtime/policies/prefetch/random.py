"""Any experts of a layer ahead: the control of the other prefetch policies."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import keys_ahead


@dataclass
class RandomPrefetch(Simple):
    """Proposes random experts of the layer `distance` ahead, as many as a token selects, drawn anew
    in every step."""

    reads_predictions: ClassVar[bool] = False

    distance: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise BadUsage("random needs distance >= 1")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._random = np.random.default_rng(self.seed)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        experts = self._random.permutation(self._shape.num_experts)[: self._shape.top_k]
        return keys_ahead(step, self.distance, self._shape, experts)

"""The experts of a layer ahead that all requests so far have used most: what is known without
knowing the context."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import keys_ahead


@dataclass
class Popular(Simple):
    """Proposes, for the layer `distance` ahead, the experts with the most tokens over the whole
    history, as many as a token selects."""

    reads_predictions: ClassVar[bool] = False

    distance: int = 1

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise BadUsage("popular needs distance >= 1")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._uses = np.zeros((shape.num_layers, shape.num_experts), np.int64)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        self._uses[step.layer] += np.bincount(
            step.selected.ravel(), minlength=self._shape.num_experts
        )
        ahead = self._uses[(step.layer + self.distance) % self._shape.num_layers]
        most = np.argsort(-ahead, kind="stable")[: self._shape.top_k]
        return keys_ahead(step, self.distance, self._shape, most[ahead[most] > 0])

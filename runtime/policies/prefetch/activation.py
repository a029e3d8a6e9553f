"""What the earlier request most like the one under way has used (MoE-Infinity, Xue et al., 2024)."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.matrices import EPSILON, Activations, Collection, shares


@dataclass
class ActivationPrefetch(Simple):
    """Of each of the next `distance` layers the `top_k * overfetch` experts with the largest share in the matched
    activation matrix, in falling order of `(share + epsilon) * (1 - ahead / (L + 1))` (the paper's algorithm 1).

    The match is the request of `capacity` earlier ones whose matrix is most like what the requests under way have used
    so far, all their tokens counted. The first request goes by its own matrix. Reads no predictions.
    """

    reads_predictions: ClassVar[bool] = False

    distance: int = 3
    overfetch: float = 2.0
    capacity: int = 100

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0 or self.capacity < 1:
            raise BadUsage("activation needs distance >= 1, overfetch > 0 and capacity >= 1")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._width = min(ceil(shape.top_k * self.overfetch), shape.num_experts)
        self._ahead = np.arange(1, min(self.distance, shape.num_layers) + 1)
        self._rows = np.arange(len(self._ahead))[:, None]
        self._discount = 1 - self._ahead[:, None] / (shape.num_layers + 1)
        self._activations, self._earlier = Activations(shape), Collection(self.capacity, shape)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        if self._activations.begins(step):
            self._earlier.add(self._activations.current)
            self._activations.begin(step)
        self._activations.count(step)
        current, shape = self._activations.current, self._shape
        self._earlier.follow(step.layer, current[step.layer])
        earlier = self._earlier.nearest()
        layers = (step.layer + self._ahead) % shape.num_layers
        matched = shares(current[layers]) if earlier is None else earlier[layers]
        top = (-matched).argsort(axis=1, kind="stable")[:, : self._width]
        share = matched[self._rows, top]
        urgency = (share + EPSILON) * self._discount
        keys, known = layers[:, None] * shape.num_experts + top, share > 0
        return keys[known][(-urgency[known]).argsort(kind="stable")]

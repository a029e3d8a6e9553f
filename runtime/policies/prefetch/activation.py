"""The experts that the earlier request most like the one under way has used (MoE-Infinity, Xue et
al., 2024)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import width
from runtime.policies.shared.activations import EPSILON, Activations, Collection

_MOST = 4096  # requests that are kept: they are compared with each other


@dataclass
class ActivationPrefetch(Simple):
    """Proposes, for each of the next `distance` layers, the `top_k * overfetch` experts with the
    largest share in the matched activation matrix. Keys are in falling order of `(share + epsilon)
    * (1 - ahead / (L + 1))` (algorithm 1 of the paper).

    The match is the one of `capacity` earlier requests whose matrix is most similar to the matrix
    of the current requests, all their tokens counted. The first request is matched with its own
    matrix. Reads no predictions.
    """

    reads_predictions: ClassVar[bool] = False

    distance: int = 3
    overfetch: float = 2.0
    capacity: int = 100

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0 or not 1 <= self.capacity <= _MOST:
            raise BadUsage(
                f"activation needs distance >= 1, overfetch > 0 and a capacity of 1 to {_MOST:,}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._width = width(shape, self.overfetch)
        ahead = np.arange(1, min(self.distance, shape.num_layers) + 1)
        self._discounts = 1 - ahead / (shape.num_layers + 1)
        self._activations = Activations(shape)
        self._earlier = Collection(self.capacity, shape)
        self._none = np.zeros((0, shape.num_experts))

    def propose(self, step: Step, now: Now) -> np.ndarray:
        activations = self._activations
        earlier = self._earlier
        if (over := activations.follow(step)) is not None:
            earlier.begin()
            for matrix in over:
                earlier.add(matrix)
        activations.count(step)
        matched = self._none
        if len(earlier):
            earlier.follow(step.layer, activations.current[step.layer])
            matched = earlier.nearest()
        keys = np.empty(len(self._discounts) * self._width, np.int64)
        num_found = activations.kernels.most_urgent(
            step.layer,
            activations.current,
            matched,
            len(earlier) > 0,
            self._width,
            EPSILON,
            self._discounts,
            keys,
            np.empty(len(keys)),
        )
        return keys[:num_found]

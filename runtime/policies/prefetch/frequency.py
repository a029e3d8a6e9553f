"""The experts that the request in hand has used most so far (MoE-Infinity: activation-aware
prefetching)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import width
from runtime.policies.shared.activations import Activations


@dataclass
class Frequency(Simple):
    """Proposes, for each of the next `distance` layers, the `top_k * overfetch` experts with the
    most tokens of the pass's requests since each request began. Ties go by the count over all
    requests.

    Keys are in falling order of `share of the layer's tokens * (1 - ahead / (L + 1))`,
    MoE-Infinity's discount of layers far ahead. Reads no predictions: it costs nothing on the
    device, and knows a prompt's experts only once decoding begins.
    """

    reads_predictions: ClassVar[bool] = False

    distance: int = 1
    overfetch: float = 1.0

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0:
            raise BadUsage("frequency needs distance >= 1 and overfetch > 0")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._width = width(shape, self.overfetch)
        self._activations = Activations(shape)
        self._lifetime = np.zeros((shape.num_layers, shape.num_experts), np.int64)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        self._activations.follow(step)
        self._activations.count(step)
        self._lifetime[step.layer] += np.bincount(
            step.selected.ravel(), minlength=self._shape.num_experts
        )
        shape = self._shape
        ahead = np.arange(1, min(self.distance, shape.num_layers) + 1)
        layers = (step.layer + ahead) % shape.num_layers
        counts = self._activations.current[layers]  # [distance, E]
        top = np.lexsort((-self._lifetime[layers], -counts), axis=1)[:, : self._width]
        share = np.take_along_axis(
            counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), top, axis=1
        )
        priority = share * (1 - ahead[:, None] / (shape.num_layers + 1))
        keys = layers[:, None] * shape.num_experts + top
        was_used = np.take_along_axis(self._lifetime[layers], top, axis=1) > 0
        return keys[was_used][np.argsort(-priority[was_used], kind="stable")]

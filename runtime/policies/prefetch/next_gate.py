"""Ask the router of a layer ahead about the input of this one (Pre-gated MoE, AdapMoE, Mixtral-Offloading)."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step


@dataclass
class NextGate(Simple):
    """The `top_k * overfetch` experts that router l + distance ranks highest, for every token of the step.

    Past the last layer the first layers of the next pass are predicted, from each request's last token. Experts come
    in falling order of the probability
    summed over the tokens.
    """

    reads_predictions: ClassVar[bool] = True

    distance: int = 1
    overfetch: float = 1.0

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0:
            raise BadUsage("next_gate needs distance >= 1 and overfetch > 0")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape

    def propose(self, step: Step, now: Now) -> np.ndarray:
        shape = self._shape
        assert step.predicted is not None, "next_gate runs without predictions"
        target = step.layer + self.distance
        predicted = step.predicted[:, self.distance - 1]  # [T, E]
        if target >= shape.num_layers and step.last is not None:
            predicted = predicted[step.last]
        width = min(ceil(shape.top_k * self.overfetch), shape.num_experts)
        if predicted.shape[0] == 1:
            experts = np.argsort(-predicted[0], kind="stable")[:width]
        else:
            top = np.argsort(-predicted, axis=1, kind="stable")[:, :width]
            chosen = np.unique(top)
            experts = chosen[np.argsort(-predicted.sum(axis=0)[chosen], kind="stable")]
        return target % shape.num_layers * shape.num_experts + experts

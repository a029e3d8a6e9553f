"""The experts that tokens go on to from this layer's experts: inter-layer expert affinity (ExFlow,
Yao et al., 2024), counted while the run goes on."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import width

_PRIOR_TOKENS = 8.0  # tokens of the layer's own mean that a pair of experts begins with


@dataclass
class Affinity(Simple):
    """Proposes, for each of the next `distance` layers, the `top_k * overfetch` experts with the
    largest chance, in falling order. The chance is the mean of `P(e | f) = (n(f, e) + 8 m(e)) /
    (n(f) + 8)` over the experts f that the step's tokens use.

    n(f) counts tokens that used f in this layer, n(f, e) those of them that used e in the layer
    ahead, m(e) is the share of tokens that use e. Past the last layer the next tokens of the same
    requests are counted. Reads no predictions, and needs no profile.
    """

    reads_predictions: ClassVar[bool] = False

    distance: int = 1
    overfetch: float = 1.0

    def __post_init__(self) -> None:
        if self.distance < 1 or self.overfetch <= 0:
            raise BadUsage("affinity needs distance >= 1 and overfetch > 0")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._width = width(shape, self.overfetch)
        self._ahead = np.arange(1, min(self.distance, shape.num_layers) + 1)
        counts = (len(self._ahead), shape.num_layers, shape.num_experts)
        # n(f), n(f, e)
        self._used = np.zeros(counts)
        self._pairs = np.zeros((*counts, shape.num_experts), np.float32)
        self._uses = np.zeros((shape.num_layers, shape.num_experts))
        self._latest: list[Step | None] = [None] * shape.num_layers

    def propose(self, step: Step, now: Now) -> np.ndarray:
        self._count(step)
        shape = self._shape
        layers = (step.layer + self._ahead) % shape.num_layers
        uses = self._uses[layers]  # [D, E]
        chance = self._chance(
            step, uses / np.maximum(uses.sum(axis=1, keepdims=True), 1) * shape.top_k
        )
        top = np.argsort(-chance, axis=1, kind="stable")[:, : self._width]
        was_used = np.take_along_axis(uses, top, axis=1) > 0
        order = np.argsort(-np.take_along_axis(chance, top, axis=1)[was_used], kind="stable")
        return (layers[:, None] * shape.num_experts + top)[was_used][order]

    def _chance(self, step: Step, mean: np.ndarray) -> np.ndarray:
        """Return [D, E] how probable each expert of the layers ahead is, from their `mean` [D,
        E]."""
        tokens = np.bincount(step.selected.ravel(), minlength=self._shape.num_experts)
        experts = np.flatnonzero(tokens)
        weights = (
            tokens[experts] / tokens.sum() / (self._used[:, step.layer, experts] + _PRIOR_TOKENS)
        )  # [D, F]
        followed = (weights[:, None] @ self._pairs[:, step.layer, experts])[:, 0]
        return followed + _PRIOR_TOKENS * weights.sum(axis=1, keepdims=True) * mean

    def _count(self, step: Step) -> None:
        """Note what this layer's tokens used, and what they had used in the layers before."""
        num_layers = self._shape.num_layers
        for place, ahead in enumerate(self._ahead.tolist()):
            before = (step.layer - ahead) % num_layers
            earlier, selected = self._both(step, before, is_next_pass=before >= step.layer)
            np.add.at(self._used[place, before], earlier, 1)
            np.add.at(self._pairs[place, before], (earlier[:, :, None], selected[:, None]), 1)
        np.add.at(self._uses[step.layer], step.selected, 1)
        self._latest[step.layer] = replace(step, selected=step.selected.copy())

    def _both(self, step: Step, layer: int, *, is_next_pass: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return what the same tokens used in a layer before and in this one, [T, K] each; past the
        last layer, what the same requests decoded in either pass."""
        latest = self._latest[layer]
        none = step.selected[:0]
        if latest is None or latest.pass_index != step.pass_index - is_next_pass:
            return none, none
        if not is_next_pass:
            return latest.selected, step.selected
        if not (latest.decodes and step.decodes):
            return none, none
        if step.requests is None or np.array_equal(latest.requests, step.requests):
            is_same = len(latest.selected) == len(step.selected)
            return (latest.selected, step.selected) if is_same else (none, none)
        earlier, here = (
            each if each.prompts is None else each.part(~each.prompts, DECODE)
            for each in (latest, step)
        )
        _, first, second = np.intersect1d(earlier.requests, here.requests, return_indices=True)
        return earlier.selected[first], here.selected[second]

"""The experts that stored maps of iterations like this one name for the layers ahead (fMoE, Yu et al., 2025)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.expertmaps import priorities, selected
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.matching import Guide, Match, check_ahead

_NONE = np.empty(0, np.int64)


@dataclass
class MapPrefetch(Simple):
    """Of the layer `distance` ahead the most probable experts of the best map until their sum reaches 1 - score, at
    least k of them; without `threshold` just k. All layers ahead compete by p / (layers ahead).

    The match is `lag` + 1 layers old: it had that long to be found. So fMoE's d is distance + lag + 1: before layer d
    the embedding guides, if `semantic`, from there on the trajectory. Nothing is known of the next pass.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"maps"})
    sees_probabilities: ClassVar[bool] = True
    sees_embeddings: ClassVar[bool] = True
    reads_predictions: ClassVar[bool] = False

    distance: int = 1
    lag: int = 0
    semantic: bool = True
    threshold: bool = True

    def __post_init__(self) -> None:
        check_ahead("map", self.distance, self.lag)

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape, self.matching = shape, artefacts.matching
        self._guide = Guide(self.matching, self.distance, self.lag, self.semantic)
        self._guided: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by layer ahead, experts and their probabilities

    def propose(self, step: Step, now: Now) -> np.ndarray:
        self._guided = {layer: found for layer, found in self._guided.items() if step.layer and layer > step.layer}
        match = self._guide.match(step)
        if match is not None:
            self._guided |= {layer: self._choose(match, layer) for layer in self._guide.layers(step, match)}
        if not self._guided:
            return _NONE
        keys = [layer * self._shape.num_experts + experts for layer, (experts, _) in self._guided.items()]
        if len(keys) == 1:
            return keys[0]
        urgency = [priorities(p, layer - step.layer) for layer, (_, p) in self._guided.items()]
        return np.concatenate(keys)[np.argsort(-np.concatenate(urgency), kind="stable")]

    def _choose(self, match: Match, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts of a layer that some request is to need, with their probabilities summed over all, the largest
        first."""
        says = match.probabilities[:, layer]
        scores = match.scores.tolist() if self.threshold else [1.0] * len(says)
        chosen = [selected(p, score, self._shape.top_k) for p, score in zip(says, scores, strict=True)]
        if len(chosen) == 1:
            return chosen[0], says[0, chosen[0]]
        experts = np.unique(np.concatenate(chosen))
        summed = says.sum(axis=0)[experts]
        order = np.argsort(-summed, kind="stable")
        return experts[order], summed[order]

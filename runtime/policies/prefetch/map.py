"""The experts that stored maps of iterations like this one name for the layers ahead (fMoE, Yu et
al., 2025)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.routing.expert_maps import priorities
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Opening, Simple, Step
from runtime.policies.shared.maps import Guide, Match, check_ahead

_NONE = np.empty(0, np.int64)


@dataclass
class MapPrefetch(Simple):
    """Proposes, for the layer `distance` ahead, the most probable experts of the best map until
    their sum reaches 1 - score, at least k of them; without `threshold` just k. All layers ahead
    compete by p / (layers ahead).

    The match is `lag` + 1 layers old, which is the time that its search may take; at lag 0
    `distance` is fMoE's d. With `semantic` the embedding guides the layers that no trajectory
    reaches, also before the first layer, where the pass waits for the search. The next pass is not
    predicted.
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
        self.opens_passes = self.semantic

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        # Imported late: numba takes long to load, and seconds when nothing is compiled yet.
        from runtime.policies.shared import map_kernels

        self._kernels = map_kernels
        self._shape = shape
        self.matching = artefacts.matching
        self._guide = Guide(self.matching, self.distance, self.lag, self.semantic)
        # By layer ahead, the chosen experts, and [E] the layer's probabilities.
        self._guided: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._pass_index = -1

    def propose_first(self, opening: Opening, now: Now) -> np.ndarray:
        return self._proposed(opening.pass_index, self._guide.first_match(opening))

    def propose(self, step: Step, now: Now) -> np.ndarray:
        return self._proposed(step.pass_index, self._guide.match(step))

    def _proposed(self, pass_index: int, match: Match | None) -> np.ndarray:
        """Return the keys of all layers ahead that are guided, by urgency; `match`: the newest."""
        guided = self._guided
        now = self.matching.layer
        for layer in [layer for layer in guided if layer <= now or pass_index != self._pass_index]:
            del guided[layer]
        self._pass_index = pass_index
        if match is not None:
            for layer in self._guide.layers(match):
                guided[layer] = self._choose(match, layer)
        if not guided:
            return _NONE
        keys = [layer * self._shape.num_experts + experts for layer, (experts, _) in guided.items()]
        if len(keys) == 1:
            return keys[0]
        urgency = [priorities(p[experts], layer - now) for layer, (experts, p) in guided.items()]
        return np.concatenate(keys)[np.argsort(-np.concatenate(urgency), kind="stable")]

    def _choose(self, match: Match, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts of a layer that some request is to need, by falling sum over all
        requests of the layer's probabilities, and these sums [E]."""
        says = match.probabilities[:, layer]
        top_k = self._shape.top_k
        likeliest = self._kernels.likeliest
        scores = match.scores.tolist() if self.threshold else [1.0] * len(says)
        if len(scores) == 1:
            return likeliest(says[0], scores[0], top_k), says[0]
        chosen = [likeliest(p, score, top_k) for p, score in zip(says, scores, strict=True)]
        experts = np.unique(np.concatenate(chosen))
        summed = says.sum(axis=0)
        return experts[np.argsort(-summed[experts], kind="stable")], summed

"""Least probable by the matched map, weighed by use (fMoE, Yu et al., 2025)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step, check_choice
from runtime.policies.eviction.shared import cells_and_view
from runtime.policies.shared.maps import Match, check_ahead


@dataclass
class MapEviction(SimpleEviction):
    """Smallest `p * freq` first. freq is the expert's uses over the whole history; p is by the map
    most similar to this iteration, the mean over the requests of a batch, from a match `lag` + 1
    layers old.

    `over` says whose: of the layers `ahead`, the next `distance` ones, p is the probability over
    the even one, and at least 1. Of layers that have run, and of those farther ahead, the search
    says nothing of the next use: freq alone. Of `all` layers, as published (section 4.5), p is the
    probability itself.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"maps"})
    sees_probabilities: ClassVar[bool] = True
    sees_embeddings: ClassVar[bool] = True

    distance: int = 1
    lag: int = 0
    over: str = "ahead"

    def __post_init__(self) -> None:
        check_ahead("map", self.distance, self.lag)
        check_choice("map", "over", self.over, "ahead", "all")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        # Imported late: numba takes long to load, and seconds when nothing is compiled yet.
        from runtime.policies.shared import map_kernels

        self._kernels = map_kernels
        self._shape = shape
        self.matching = artefacts.matching
        self._counts, self._uses = cells_and_view(np.zeros(shape.num_keys))
        self._worth = np.empty(shape.num_keys)
        self._alike = np.zeros(shape.num_keys, np.int64)
        self._match: Match | None = None
        self._said = np.zeros((1, shape.num_keys), np.float32)

    @property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        match = self.matching.match(self.lag)
        num_experts = self._shape.num_experts
        if match is not None and match is not self._match:
            self._match = match
            self._said = match.probabilities.reshape(len(match.scores), len(self._worth))
        layers = range(0) if match is None else self._layers()
        first = layers.start * num_experts
        stop = layers.stop * num_experts
        scale, least = (1.0, 0.0) if self.over == "all" else (num_experts, 1.0)
        self._kernels.weigh(self._said, first, stop, scale, least, self._uses, self._worth)
        return self._worth, self._alike

    def _layers(self) -> range:
        """Return the layers whose probabilities count."""
        if self.over == "all":
            return range(self._shape.num_layers)
        ahead = self.matching.layer + 1
        return range(ahead, min(ahead + self.distance, self._shape.num_layers))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self.matching.see(step)
        counts = self._counts
        for key in keys:
            counts[key] += 1

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self.ranks[0][keys],)

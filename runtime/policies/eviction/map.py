"""Least probable by the matched map, weighed by use (fMoE, Yu et al., 2025)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.matching import Match, check_ahead


@dataclass
class MapEviction(SimpleEviction):
    """Smallest `p * freq` first: p what the map most like this iteration says of the expert, the mean over the requests
    of a batch, from a match `lag` + 1 layers old; freq its uses over the whole history. Before any match, freq alone.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"maps"})
    sees_probabilities: ClassVar[bool] = True
    sees_embeddings: ClassVar[bool] = True

    lag: int = 0

    def __post_init__(self) -> None:
        check_ahead("map", 1, self.lag)

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self.matching = artefacts.matching
        self._uses = np.zeros(shape.num_keys)
        self._p = np.ones(shape.num_keys)
        self._match: Match | None = None
        self._alike = np.zeros(shape.num_keys, np.int64)

    @property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        match = self.matching.latest(self.lag)
        if match is not None and match is not self._match:
            said = match.probabilities.reshape(len(match.scores), -1)
            self._match, self._p = match, np.add.reduce(said, axis=0, dtype=np.float64) / len(said)
        return self._p * self._uses, self._alike

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self.matching.see(step)
        self._uses[keys] += 1

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self.ranks[0][keys],)

"""Every expert of a layer ahead whose predicted probability stands out (SpecMD's score axis)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Simple, Step
from runtime.policies.prefetch.ahead import keys_ahead, most_probable_first, predicted_ahead


@dataclass
class ScorePrefetch(Simple):
    """Experts above the `percentile` of what router l + distance predicts for some token, most
    probable first.

    The percentile is over the layer's experts, token by token: 80 keeps at most a fifth of them for
    each token.
    """

    reads_predictions: ClassVar[bool] = True
    follows_steps: ClassVar[bool] = False

    distance: int = 1
    percentile: float = 80.0

    def __post_init__(self) -> None:
        if self.distance < 1 or not 0 <= self.percentile <= 100:
            raise BadUsage("score needs distance >= 1 and percentile in 0..100")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape

    def propose(self, step: Step, now: Now) -> np.ndarray:
        predicted = predicted_ahead(step, self.distance, self._shape)
        if len(predicted) == 1:
            return keys_ahead(step, self.distance, self._shape, self._of_one(predicted[0]))
        stands_out = predicted > percentile(predicted, self.percentile)[:, None]
        experts = most_probable_first(np.flatnonzero(stands_out.any(axis=0)), predicted)
        return keys_ahead(step, self.distance, self._shape, experts)

    def _of_one(self, p: np.ndarray) -> np.ndarray:
        """Return the same experts for one token, [E], from a single sort."""
        order = (-p).argsort(kind="stable")
        limit = _between(p[order[::-1]], self.percentile)
        return order[: np.count_nonzero(p > limit)]


def percentile(values: np.ndarray, percent: float) -> np.ndarray:
    """Return percentiles [...] of values [..., N], linear between neighbours as `np.percentile`
    computes them, which spends most of its time on preparing short rows."""
    return _between(np.sort(values, axis=-1), percent)


def _between(ordered: np.ndarray, percent: float) -> np.ndarray:
    """Return percentiles [...] of ascending values [..., N]."""
    place = percent / 100 * (ordered.shape[-1] - 1)
    below = int(place)
    above = min(below + 1, ordered.shape[-1] - 1)
    return ordered[..., below] + (place - below) * (ordered[..., above] - ordered[..., below])

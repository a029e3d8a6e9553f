"""Blend in plain numpy: every chance is computed from matrices."""

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.base import Step
from runtime.policies.prefetch.ahead import keys_ahead, named, of_interest
from runtime.policies.prefetch.blend import Blend

_TOKENS = np.array([4.0, 16.0, 64.0])
_MOST = 4.0
_LEAST = 1e-3
_RIDGE = 20.0
_KEPT = 0.9995


class Reference:
    """Supports no maps; the parameters are those of `blend`."""

    def __init__(self, shape: Shape, blend: Blend) -> None:
        self._shape = shape
        self._reach = min(blend.distance, shape.num_layers)
        self._blend = blend
        self._chances = _Chances(shape, self._reach, num_known=4 + 2 * (1 + blend.learned))
        self._uses = np.full(
            (shape.num_layers, len(_TOKENS), shape.num_experts), shape.top_k / shape.num_experts
        )

    def propose(self, step: Step) -> np.ndarray:
        used = np.bincount(step.selected[step.selected >= 0], minlength=self._shape.num_experts)
        if step.phase != PREFILL:
            self._chances.learn(step.layer, used > 0)
        gain = 1 - (1 - 1 / _TOKENS[:, None]) ** len(step.selected)
        self._uses[step.layer] += gain * (used / len(step.selected) - self._uses[step.layer])
        if step.phase == PREFILL and step.layer + 1 < self._shape.num_layers:
            foreseen = of_interest(step, step.foreseen, 1, self._shape)
            return keys_ahead(step, 1, self._shape, named(foreseen, self._shape.top_k))
        return self._likely(step)

    def _likely(self, step: Step) -> np.ndarray:
        layers = (step.layer + np.arange(1, self._reach + 1)) % self._shape.num_layers
        chances = self._chances.predict(layers, self._known(step, layers))
        floors = np.full((self._reach, 1), self._blend.far)
        floors[0] = self._blend.floor
        ahead, experts = np.nonzero(chances >= floors)
        order = np.lexsort((-chances[ahead, experts], ahead))
        return (layers[ahead] * self._shape.num_experts + experts)[order]

    def _known(self, step: Step, layers: np.ndarray) -> np.ndarray:
        """Return the features [D, F, E] of each expert of the layers ahead."""
        said = [self._margins(step, step.predicted)]
        if self._blend.learned:
            said.append(self._margins(step, step.learned))
        often = np.clip(self._uses[layers], _LEAST, 1 - _LEAST)
        parts = [np.ones((self._reach, 1, self._shape.num_experts))]
        parts += [part for margins in said for part in (margins, np.maximum(margins, 0))]
        parts.append(np.log(often / (1 - often)))
        return np.concatenate(parts, axis=1)

    def _margins(self, step: Step, foreseen: np.ndarray) -> np.ndarray:
        """Return margins [D, 1, E] by which each expert is in, or out of, the k named, the largest
        over the tokens."""
        top_k = self._shape.top_k
        num_experts = self._shape.num_experts
        rows = [
            of_interest(step, foreseen, ahead, self._shape) for ahead in range(1, self._reach + 1)
        ]
        margins = []
        for predicted in rows:
            odds = np.log(np.maximum(predicted, 1e-9))
            first_out = max(num_experts - top_k - 1, 0)
            limits = np.partition(odds, (first_out, num_experts - top_k), axis=1)
            limit = (limits[:, first_out] + limits[:, num_experts - top_k]) / 2
            margins.append(np.clip(odds - limit[:, None], -_MOST, _MOST).max(axis=0))
        return np.stack(margins)[:, None]


class _Chances:
    """Logistic regressions, one a layer and distance, fitted online."""

    def __init__(self, shape: Shape, distance: int, *, num_known: int) -> None:
        size = (shape.num_layers, distance)
        self._weights = np.zeros((*size, num_known))
        self._weights[..., 0] = -1.0
        self._weights[..., 1:-1:2] = 0.5
        self._moments = np.tile(np.eye(num_known) * _RIDGE, (*size, 1, 1))
        self._known = np.zeros((*size, num_known, shape.num_experts))
        self._predicted = np.full((*size, shape.num_experts), np.nan)
        self._ahead = np.arange(distance)

    def predict(self, layers: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return the chances [D, E] that the next visits of `layers` [D] use each expert, and keep
        them until those visits."""
        odds = (self._weights[layers, self._ahead][:, None] @ known)[:, 0]
        chances = 1 / (1 + np.exp(-np.clip(odds, -12, 12)))
        self._known[layers, self._ahead] = known
        self._predicted[layers, self._ahead] = chances
        return chances

    def learn(self, layer: int, used: np.ndarray) -> None:
        """Learn from a visit of a layer; `used` [E] bool: the experts that it used."""
        predicted = self._predicted[layer]
        known = self._known[layer]
        told = ~np.isnan(predicted[:, 0])
        if not told.any():
            return
        predicted = predicted[told]
        known = known[told]
        moments = self._moments[layer, told]
        moments += (known * (predicted * (1 - predicted))[:, None]) @ known.transpose(0, 2, 1)
        missed = known @ (used - predicted)[..., None]
        self._weights[layer, told] += np.linalg.solve(moments, missed)[..., 0]
        self._moments[layer, told] = moments * _KEPT
        self._predicted[layer] = np.nan

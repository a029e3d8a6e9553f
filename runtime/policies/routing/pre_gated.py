"""The router's word on the input of the layer before selects, so that what was predicted is what is
wanted (Pre-gated MoE, untrained; lossy)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Simple, Step


@dataclass
class PreGated(Simple):
    """Selects the experts that the router of this layer ranked highest on the input of the layer
    before.

    An expert that the router selects now as well has its present weight. Another has its share of
    the earlier prediction, but at most the weight of the weakest that the router selects now. The
    first layer, which has no layer before it in the pass, selects as usual.
    """

    reroutes: ClassVar[bool] = True
    follows_predictions: ClassVar[bool] = True

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._before: Step | None = None

    def route(self, step: Step, resident: np.ndarray) -> Step:
        before = self._before
        self._before = step
        assert step.predicted is not None, "pre_gated runs without predictions"
        if before is None or (before.pass_index, before.layer + 1) != (step.pass_index, step.layer):
            return step
        said = before.predicted[:, 0]
        selected = np.argsort(-said, axis=1, kind="stable")[:, : step.selected.shape[1]]
        is_same = selected[:, :, None] == step.selected[:, None, :]  # [T, K, K]
        is_own = is_same.any(axis=2)
        if is_own.all():
            return step
        shares = np.take_along_axis(said, selected, axis=1)
        shares *= step.weights.sum(axis=1, keepdims=True) / shares.sum(axis=1, keepdims=True)
        others = np.minimum(shares, step.weights.min(axis=1, keepdims=True))
        weights = np.where(is_own, (is_same * step.weights[:, None, :]).sum(axis=2), others)
        order = np.argsort(-weights, axis=1, kind="stable")
        ranked = (
            np.take_along_axis(values, order, axis=1)
            for values in (selected, weights.astype(np.float32))
        )
        return replace(step, **dict(zip(("selected", "weights"), ranked, strict=True)))

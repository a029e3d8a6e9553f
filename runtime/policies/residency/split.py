"""The tops of many experts are resident, not the whole of few; their bottoms pass through the fast tier (MoEpic)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, FastTier, SimpleResidency, Split

_MOST_PASSING = 0.25  # of the budget, for bottoms, as long as tops are wanting


@dataclass
class SplitResidency(SimpleResidency):
    """Every expert is cut at `theta`: its first `theta * I` neurons are its top, the others its bottom.

    Tops stay, as the eviction policy says; each layer has as many as its share of the budget holds. Bottoms, and what
    else a token brings, pass: `passing` of them fit at a time, two tokens' worth of experts of one layer if not given,
    but at most a quarter of the budget; and as many more as the tops leave room for.
    """

    cuts: ClassVar[bool] = True

    theta: float = 0.5
    passing: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise BadUsage(f"split needs theta above 0 and at most 1, not {self.theta:g}")
        if self.passing is not None and self.passing < 1:
            raise BadUsage(f"split: at least one bottom passes at a time, not {self.passing}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape

    def share(self, budget_nbytes: int) -> FastTier:
        """Raises BadUsage when the budget does not hold one expert a layer."""
        shape = self._shape
        least = shape.num_layers * shape.expert_nbytes
        if budget_nbytes < least:
            raise BadUsage(
                f"the budget of {budget_nbytes:,} bytes does not hold one expert a layer: give at least "
                f"{shape.num_layers}x ({least:,} bytes)"
            )
        neurons = shape.top_neurons(self.theta)
        top, bottom = shape.segment_nbytes(neurons)
        left = budget_nbytes - self._reserved(budget_nbytes, bottom)
        num_tops = min(max(left // top, shape.num_layers), shape.num_keys)
        num_bottoms = min((budget_nbytes - num_tops * top) // bottom, shape.num_keys) if bottom else 0
        split = Split(np.full(shape.num_layers, neurons), self.capacities(num_tops, shape), num_bottoms)
        return FastTier(num_tops + num_bottoms, split=split)

    def _reserved(self, budget_nbytes: int, bottom: int) -> int:
        """Bytes kept for bottoms."""
        if self.passing is not None:
            return self.passing * bottom
        return max(bottom, min(2 * self._shape.top_k * bottom, int(_MOST_PASSING * budget_nbytes)))

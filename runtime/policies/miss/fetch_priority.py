"""Fetch what matters at full precision and the rest as a low replica (SpecMD's miss axis;
lossy)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation.widths import Width, as_width
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.prefetch.score import percentile
from runtime.policies.shared.misses import check_replicas


@dataclass
class FetchPriority(Simple):
    """Missing experts below the `percentile` of the step's routing shares are fetched at `bits`,
    the others at full precision.

    An expert's share is the largest that a token gives it; the percentile is over the distinct
    experts wanted.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})

    percentile: float = 60.0
    bits: float = 4

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise BadUsage(f"fetch_priority needs percentile in 0..100, not {self.percentile}")
        self.bits = as_width(self.bits)

    @property
    def named_widths(self) -> tuple[Width, ...]:
        return (self.bits,)

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        check_replicas("fetch_priority", artefacts, self.bits)
        self.widths = (self.bits,)
        self._num_experts = shape.num_experts

    def choose(self, step: Step, residents: Residents) -> Choice:
        shares = np.zeros(self._num_experts)
        np.maximum.at(shares, step.selected, step.shares)
        bar = percentile(shares[shares > 0], self.percentile)
        low = [expert for expert in residents.missing(step) if shares[expert] < bar]
        return Choice(step.selected, bits=dict.fromkeys(low, self.bits))

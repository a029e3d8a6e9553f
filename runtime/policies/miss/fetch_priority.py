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
    experts wanted. Those below the `drop` percentile are left out, never a token's first: a reading
    of SpecMD's drop-priority cascade (Figure 7), which the paper names and does not describe.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})

    percentile: float = 60.0
    bits: float = 4
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= self.percentile <= 100:
            raise BadUsage(
                "fetch_priority needs 0 <= drop <= percentile <= 100, not "
                f"{self.drop} and {self.percentile}"
            )
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
        selected = step.selected
        if self.drop:
            is_weak = shares < percentile(shares[shares > 0], self.drop)
            dropped = residents.absent[selected] & is_weak[selected]
            dropped[:, 0] = False
            selected = np.where(dropped, -1, selected)
        wanted = set(selected.ravel().tolist())
        low = [e for e in residents.missing(step) if e in wanted and shares[e] < bar]
        return Choice(selected, bits=dict.fromkeys(low, self.bits))

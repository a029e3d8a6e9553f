"""The less a gate score matters, the lower the precision that is fetched: full, 4, 2 bits (HOBBIT;
lossy)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.shared.misses import check_replicas

LOW = 4
LOWEST = 2


@dataclass
class Cascade(Simple):
    """HOBBIT's unimportance of a rank is the share of weight that stronger ranks of its token hold,
    0 for the first.

    Up to `high` a rank's expert is fetched at full precision, up to `low` at 4 bits, beyond at 2.
    An expert that several tokens want is fetched at the highest precision that any of them asks
    for.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})

    high: float = 0.6
    low: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.high <= self.low <= 1:
            raise BadUsage(f"cascade needs 0 <= high <= low <= 1, not {self.high} and {self.low}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        check_replicas("cascade", artefacts, LOW, LOWEST)
        self.widths = (LOW, LOWEST)
        self._num_experts = shape.num_experts

    def choose(self, step: Step, residents: Residents) -> Choice:
        shares = step.shares
        unimportance = np.full(self._num_experts, np.inf)
        np.minimum.at(unimportance, step.selected, shares.cumsum(axis=1) - shares)
        missing = residents.missing(step)
        below = {expert: LOW if unimportance[expert] <= self.low else LOWEST for expert in missing}
        return Choice(
            step.selected,
            bits={e: bits for e, bits in below.items() if unimportance[e] > self.high},
        )

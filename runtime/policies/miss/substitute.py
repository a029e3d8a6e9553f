"""A resident expert that the router rates about the same stands in (Zhu et al.: importance-driven;
lossy)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from runtime.policies.base import Choice, Residents, Simple, Step
from runtime.policies.shared.misses import stand_in


@dataclass
class Substitute(Simple):
    """The stand-in of missing expert i is the resident j of smallest `|p_j - p_i|`, if that is at
    most `tolerance * p_i`.

    p are the router's probabilities for this token. Ranks before `rank` matter most and are always
    fetched, like any rank without a stand-in.
    """

    sees_probabilities: ClassVar[bool] = True

    tolerance: float = 0.5
    rank: int = 1

    def __post_init__(self) -> None:
        if self.tolerance < 0 or self.rank < 0:
            raise BadUsage(
                f"substitute needs tolerance >= 0 and rank >= 0, not {self.tolerance} and "
                f"{self.rank}"
            )

    def choose(self, step: Step, residents: Residents) -> Choice:
        probabilities = step.probabilities
        assert probabilities is not None, "substitute runs without router probabilities"

        def closeness(tokens: np.ndarray, experts: np.ndarray) -> np.ndarray:
            selected_p = probabilities[tokens, experts][:, None]
            gap = np.abs(probabilities[tokens] - selected_p)
            return np.where(gap <= self.tolerance * selected_p, -gap, -np.inf)

        missing = residents.absent[step.selected]
        missing[:, : self.rank] = False
        return Choice(stand_in(step.selected, missing, residents.resident, closeness))

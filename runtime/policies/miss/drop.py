"""Leave out the weaker experts of a token when they are absent (lossy); the stronger are fetched."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from runtime.policies.base import Choice, Residents, Simple, Step
from runtime.policies.miss.weights import keep_sum


@dataclass
class Drop(Simple):
    """Ranks at or beyond `rank` are dropped when absent. With `renormalise` the others share their weight."""

    rank: int = 1
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise BadUsage(f"drop needs rank >= 0, not {self.rank}")

    def choose(self, step: Step, residents: Residents) -> Choice:
        dropped = residents.absent[step.selected]
        dropped[:, : self.rank] = False
        selected = np.where(dropped, -1, step.selected)
        return Choice(selected, weights=keep_sum(step.weights, selected) if self.renormalise else None)

"""Leave out whatever is absent: the control of every stand-in (lossy)."""

from dataclasses import dataclass

import numpy as np

from runtime.policies.base import Choice, Residents, Simple, Step
from runtime.policies.shared.misses import beyond_free, keep_sum


@dataclass
class Zero(Simple):
    """Drops missing experts. With `fill` a missing expert is fetched while its scope has an empty
    slot: a cold cache would otherwise stay empty. With `renormalise` the other ranks share its
    weight."""

    fill: bool = True
    renormalise: bool = False

    def choose(self, step: Step, residents: Residents) -> Choice:
        selected = np.where(beyond_free(step, residents, fill=self.fill), -1, step.selected)
        return Choice(
            selected, weights=keep_sum(step.weights, selected) if self.renormalise else None
        )

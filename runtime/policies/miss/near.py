"""Compute a missing expert where it lies, on the near tier (Fiddler, KTransformers; lossless)."""

from dataclasses import dataclass

import numpy as np

from runtime.policies.base import Choice, Residents, Simple, Step


@dataclass
class Near(Simple):
    """With `fill`, a missing expert is fetched while its scope still has an empty slot, so that a cold cache warms
    up."""

    fill: bool = True

    def choose(self, step: Step, residents: Residents) -> Choice:
        first_seen = np.unique(step.selected, return_index=True)
        wanted = first_seen[0][np.argsort(first_seen[1])]
        missing = wanted[residents.absent[wanted]]
        fetched = residents.num_free if self.fill else 0
        return Choice(step.selected, near=frozenset(missing[fetched:].tolist()))

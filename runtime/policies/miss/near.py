"""Compute a missing expert where it lies, on the near tier (Fiddler, KTransformers; lossless)."""

from dataclasses import dataclass

from runtime.policies.base import Choice, Residents, Simple, Step
from runtime.policies.miss.missing import missing_experts


@dataclass
class Near(Simple):
    """With `fill`, a missing expert is fetched while its scope has an empty slot, so that a cold cache warms up."""

    fill: bool = True

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = missing_experts(step, residents)
        fetched = residents.num_free if self.fill else 0
        return Choice(step.selected, near=frozenset(missing[fetched:]))

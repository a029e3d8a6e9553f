"""Load what is missing and wait for it (lossless)."""

from dataclasses import dataclass
from typing import ClassVar

from runtime.policies.base import Choice, Residents, Simple, Step


@dataclass
class Fetch(Simple):
    chooses: ClassVar[bool] = False

    def choose(self, step: Step, residents: Residents) -> Choice:
        return Choice(step.selected)

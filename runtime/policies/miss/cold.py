"""Fetch in the prompt; while decoding, compute near its memory what the placement left there (context-aware GPU-NDP,
MoNDE)."""

from dataclasses import dataclass
from typing import ClassVar

from artifacts.traces.trace import PREFILL
from runtime.policies.base import Choice, Residents, Simple, Step


@dataclass
class Cold(Simple):
    """Experts are computed at the precision of their placement; loading experts are computed near as well."""

    every_step: ClassVar[bool] = True

    def choose(self, step: Step, residents: Residents) -> Choice:
        if step.phase == PREFILL:
            return Choice(step.selected)
        missing = step.selected[~residents.resident[step.selected]]
        return Choice(step.selected, near=frozenset(missing.tolist()))

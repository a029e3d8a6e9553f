"""The resident expert with the highest live router score stands in: the control that needs no
artefact (lossy)."""

from dataclasses import dataclass
from typing import ClassVar

from runtime.policies.base import Choice, Residents, Simple, Step
from runtime.policies.shared.misses import beyond_free, by_probability, stand_in


@dataclass
class BestResident(Simple):
    """The stand-in is a resident that the token does not use. An expert without one is fetched;
    with `fill` also an expert for which there is an empty slot."""

    sees_probabilities: ClassVar[bool] = True

    fill: bool = True

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = beyond_free(step, residents, fill=self.fill)
        return Choice(stand_in(step.selected, missing, residents.resident, by_probability(step)))

"""Fetch what is missing at the lowest precision there is: the fewest bytes (SpecMD's miss axis;
lossy)."""

from dataclasses import dataclass
from typing import ClassVar

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step


@dataclass
class FetchLowest(Simple):
    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._bits = min(artefacts.replicas.nbytes)
        self.widths = (self._bits,)

    def choose(self, step: Step, residents: Residents) -> Choice:
        return Choice(step.selected, bits=dict.fromkeys(residents.missing(step), self._bits))

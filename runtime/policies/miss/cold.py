"""Fetch in the prompt; while decoding, compute near its memory what the placement left there
(context-aware GPU-NDP, MoNDE)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step


@dataclass
class Cold(Simple):
    """Experts are computed at the precision of their placement; loading experts are computed near
    as well. If a step serves prompts and answers together, the experts that a prompt wants are
    fetched for both.

    With `swap`, that many experts a layer and decoded token are swapped in instead: fetched and
    waited for. They are the absent experts that most of the step's tokens want, the first wanted
    among equals. This is the on-demand swapping of earlier GPU-NDP systems (*Context-Aware MoE
    Inference on CXL-Enabled GPU-NDP Systems*, section 2.2). Tokens at which nothing is absent leave
    their share to later ones.
    """

    every_step: ClassVar[bool] = True

    swap: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.swap < math.inf:
            raise BadUsage(
                "cold needs swap, the experts swapped in a layer and token, of at least 0, not "
                f"{self.swap}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._due = np.zeros(shape.num_layers)  # experts to swap in, by layer

    def choose(self, step: Step, residents: Residents) -> Choice:
        if not step.decodes:
            return Choice(step.selected)
        missing = frozenset(step.selected[~residents.resident[step.selected]].tolist())
        if step.prompts is not None:
            missing = missing.difference(step.selected[step.prompts].ravel().tolist())
            return Choice(step.selected, near=missing)
        return Choice(
            step.selected,
            near=missing.difference(self._swapped(step, residents)) if self.swap else missing,
        )

    def _swapped(self, step: Step, residents: Residents) -> list[int]:
        """Return the absent experts to fetch, and take their number off what is due."""
        self._due[step.layer] += self.swap * len(step.selected)
        swapped = residents.missing(step)[: int(self._due[step.layer])]
        self._due[step.layer] -= len(swapped)
        return swapped

"""Compute what is missing on its own low-bit replica, which stays in the fast tier (moectl; lossy,
never stalls)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation.widths import column_of
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.shared.misses import count_uses, paying


@dataclass
class ShadowMiss(Simple):
    """No step waits for a load, not even for experts in flight; full precision is loaded while
    others are computed, if that pays.

    Loading an expert pays if its loss per token, as its layer has routed lately, is more than
    `margin` times the least such loss of the layer's residents. Both take the same bytes, so that
    loss times expected uses decides. An empty slot is worth any load. Uses decay with a half-life
    of `half_life` tokens.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})
    every_step: ClassVar[bool] = True
    reads_shadows: ClassVar[bool] = True
    loads_behind: ClassVar[bool] = True

    margin: float = 2.0
    half_life: float = 64.0

    def __post_init__(self) -> None:
        if self.margin < 1 or self.half_life <= 0:
            raise BadUsage(
                f"shadow needs margin >= 1 and half_life > 0, not {self.margin} and "
                f"{self.half_life}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._loss = artefacts.replicas.loss[..., column_of(artefacts.replicas.widths[-1])]
        self._uses = np.zeros((shape.num_layers, shape.num_experts))

    def choose(self, step: Step, residents: Residents) -> Choice:
        wanted = np.unique(step.selected)
        worth = self._worth(step)
        low = wanted[~residents.resident[wanted]]
        absent = low[residents.absent[low]]
        return Choice(
            step.selected,
            low=frozenset(low.tolist()),
            behind=paying(absent, worth, residents, self.margin),
        )

    def _worth(self, step: Step) -> np.ndarray:
        """Return [E] the loss of each expert of the layer times its uses so far, this step
        included."""
        uses = self._uses[step.layer]
        count_uses(uses, step, step.shares**2, self.half_life)
        return self._loss[step.layer] * uses

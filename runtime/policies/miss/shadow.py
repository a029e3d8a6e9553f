"""Compute what is missing on its own low-bit replica, which stays in the fast tier (moectl; lossy,
never stalls)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation.widths import column_of
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.step import fitting


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
            behind=tuple(self._paying(absent, worth, residents).tolist()),
        )

    def _worth(self, step: Step) -> np.ndarray:
        """Return [E] the loss of each expert of the layer times its uses so far, this step
        included."""
        uses = self._uses[step.layer]
        uses *= 0.5 ** (len(step.selected) / self.half_life)
        np.add.at(uses, step.selected, step.shares**2)
        return self._loss[step.layer] * uses

    def _paying(self, absent: np.ndarray, worth: np.ndarray, residents: Residents) -> np.ndarray:
        """Return those of `absent` that are worth a load, best first."""
        best = absent[np.argsort(-worth[absent], kind="stable")]
        bar = self.margin * worth[residents.resident].min(initial=np.inf)
        pays = worth[best] > bar
        if any(residents.num_free):
            pays |= np.isin(best, fitting(best.tolist(), residents.num_free))
        return best[pays]

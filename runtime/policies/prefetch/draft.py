"""Prefetch what the routers chose for the tokens of a pass while these were drafted."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Opening, Simple, Step
from runtime.policies.prefetch.next_gate import NextGate

UNTOLD = (
    "prefetch draft: no drafter has run the model over its drafts (--draft resident does): "
    "next_gate predicts all"
)


@dataclass
class DraftPrefetch(Simple):
    """Of each of the next `ahead` layers the experts that its router chose for the tokens of the
    pass while a drafter ran the model over them; those of layer 0 before the pass begins.

    The nearest layer comes first, and in a layer the last token and the first drafts, as drafts
    tell less of a pass the further they are from what is sure. For tokens that no drafter read, and
    past the last layer, it proposes what `next_gate` does.
    """

    reads_predictions: ClassVar[bool] = True
    reads_foretold: ClassVar[bool] = True
    follows_steps: ClassVar[bool] = False
    opens_passes: ClassVar[bool] = True
    distance: ClassVar[int] = 1  # of predictions

    ahead: int = 2

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise BadUsage("draft needs ahead >= 1")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._next_gate = NextGate()
        self._next_gate.prepare(shape, artefacts)

    def propose_first(self, opening: Opening, now: Now) -> np.ndarray:
        if opening.foretold is None:
            return np.empty(0, np.int64)
        return self._told(opening.foretold, 0, self.ahead)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        told = step.foretold
        first = step.layer + 1
        if told is None or first == self._shape.num_layers:
            return self._next_gate.propose(step, now)
        keys = [self._told(told, first, first + 1)]
        untold = told[:, first, 0] < 0
        if untold.any():
            keys.append(self._next_gate.propose(step.part(untold, step.phase), now))
        keys.append(self._told(told, first + 1, first + self.ahead))
        return np.concatenate(keys)

    def _told(self, told: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return the keys that `told` [T, L, K] names in the layers from `first` to `last`."""
        by_layer = told[:, first:last].transpose(1, 0, 2)
        layers = np.arange(first, first + len(by_layer))[:, None, None]
        return (by_layer + layers * self._shape.num_experts)[by_layer >= 0]

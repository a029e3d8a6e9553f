"""Leave out the weaker experts of a token when they are absent, or always (lossy); the stronger are
fetched."""

from dataclasses import dataclass
from math import inf

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.shared.misses import keep_sum

_ALIKE = (
    "no sensitivity of layers is stored: drop takes all for equally sensitive; `moectl profile` "
    "measures it"
)


@dataclass
class Drop(Simple):
    """Ranks at or beyond `rank` are dropped when absent. With `renormalise` the other ranks share
    their weight.

    With `always`, they are dropped when resident too: fewer experts a token. With `layer` all this
    is of that layer alone; `rank=0,always=yes,layer=3` skips the routed experts of layer 3.

    With `tolerance`, ranks are dropped from the weakest on, while the square of the share of weight
    that a token drops, times the layer's sensitivity (1 on average), is at most `tolerance`
    (AdapMoE).
    """

    rank: int = 1
    renormalise: bool = False
    tolerance: float = inf
    always: bool = False
    layer: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise BadUsage(f"drop needs rank >= 0, not {self.rank}")
        if self.tolerance < 0:
            raise BadUsage(f"drop needs tolerance >= 0, not {self.tolerance:g}")

    @property
    def every_step(self) -> bool:
        return self.always

    @property
    def wants(self) -> frozenset[str]:
        return frozenset() if self.tolerance == inf else frozenset({"sensitivity"})

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._sensitivity = (
            np.ones(shape.num_layers) if artefacts.sensitivity is None else artefacts.sensitivity
        )
        self.fallbacks = (_ALIKE,) if self.wants and artefacts.sensitivity is None else ()

    def choose(self, step: Step, residents: Residents) -> Choice:
        if self.layer not in (None, step.layer):
            return Choice(step.selected)
        dropped = np.ones_like(step.selected, bool)
        if not self.always:
            dropped = residents.absent[step.selected]
        dropped[:, : self.rank] = False
        if self.tolerance < inf:
            left_out = np.where(dropped, step.shares, 0.0)[:, ::-1].cumsum(axis=1)[:, ::-1]
            dropped &= self._sensitivity[step.layer] * left_out**2 <= self.tolerance
        selected = np.where(dropped, -1, step.selected)
        return Choice(
            selected, weights=keep_sum(step.weights, selected) if self.renormalise else None
        )

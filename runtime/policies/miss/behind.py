"""Compute a missing expert near now and bring it behind, for its next use (lossless)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.base import Artefacts, Choice, Residents, Step
from runtime.policies.miss.qstar import QStar
from runtime.policies.shared.misses import count_uses, paying


@dataclass
class Behind(QStar):
    """Divides a decoded token's misses as `qstar` does, so that link and near tier end together;
    what the link has left to move of the transfer in flight goes before any load that is waited
    for. A step that waits for no load brings behind what it computes near, if that pays, within
    the bytes that it may prefetch. One that waits for some brings only as many as have come before
    the next step, whose loads they would delay. An expert that is asked for while it is under way
    is computed near again. What a prompt wants is fetched.

    A load pays if the layer's tokens have lately used the expert more than `margin` times as often
    as the least used of the layer's residents; uses decay with a half-life of `half_life` tokens.
    An empty slot is worth any load. `ratio` and `tokens` are as for `qstar`; without a ratio, the
    machine's is taken.
    """

    name: ClassVar[str] = "behind"
    every_step: ClassVar[bool] = True
    loads_behind: ClassVar[bool] = True

    ratio: float | None = None
    margin: float = 2.0
    half_life: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin < 1 or self.half_life <= 0:
            raise BadUsage(
                f"behind needs margin >= 1 and half_life > 0, not {self.margin} and "
                f"{self.half_life}"
            )

    @property
    def ratio_is_open(self) -> bool:
        return self.ratio is None

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._uses = np.zeros((shape.num_layers, shape.num_experts))

    def choose(self, step: Step, residents: Residents) -> Choice:
        assert not self.ratio_is_open, "behind runs without a ratio of link to near bandwidth"
        uses = self._uses[step.layer]
        count_uses(uses, step, 1.0, self.half_life)
        if step.phase == PREFILL or residents.resident[step.selected].all():
            return Choice(step.selected)
        missing = residents.missing(step)
        coming = residents.coming(step)
        each = self._near_times(missing, step)
        coming_time = float(self._near_times(coming, step).sum())
        fetched = self.num_fetched(each, busy=residents.busy, near_time=coming_time)
        near = missing[fetched:]
        near_time = float(each[fetched:].sum()) + coming_time
        brought = paying(np.array(near, np.int64), uses, residents, self.margin)
        return Choice(
            step.selected,
            near=frozenset(near + coming),
            behind=brought[: int(residents.room)] if fetched else brought,
            lent=max(0.0, near_time * self.ratio - fetched),
        )

"""Fetch the misses that were used last, as many as the link brings while the near tier computes the
others (FreeToken's hybrid mode; lossless)."""

from dataclasses import dataclass
from math import floor, inf
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step


@dataclass
class Hybrid(Simple):
    """Of a decoded step's m misses, fetches the f that the layer used last, ties by the lower
    expert, and computes m - f near. f is floor(m r) or one more, whichever has the lower
    `max(f (1 - r), (m - f) r)`, ties to the fewer: r, the `ratio` of the bandwidth of the link over
    that of the near tier, counts what the link moves as read from the near tier's memory too. With
    `most`, at most that many are fetched instead. What is computed near is not brought. What a
    prompt wants is fetched. Without a ratio, the machine's is taken.

    Source: FreeToken, `_ensure_experts_hybrid_cpu` of python/freetoken/moe/offload_kernels.py at
    2fa773aa, where r is kept in 1/65536.
    """

    every_step: ClassVar[bool] = True

    ratio: float | None = None
    most: int = 0

    def __post_init__(self) -> None:
        if self.most < 0 or self.ratio is not None and not 0 < self.ratio < inf:
            raise BadUsage(
                "hybrid needs a ratio of link to near bandwidth above 0 and most >= 0, not "
                f"{self.ratio} and {self.most}"
            )

    @property
    def ratio_is_open(self) -> bool:
        return self.ratio is None and not self.most

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        # steps of a layer that were decoded, and the number of the last that used each expert
        self._steps = np.zeros(shape.num_layers, np.int64)
        self._used_in = np.full((shape.num_layers, shape.num_experts), -1, np.int64)

    def choose(self, step: Step, residents: Residents) -> Choice:
        assert not self.ratio_is_open, "hybrid runs without a ratio of link to near bandwidth"
        if step.phase == PREFILL:
            return Choice(step.selected)
        used_in = self._used_in[step.layer]
        missing = sorted(residents.missing(step), key=lambda expert: (-used_in[expert], expert))
        self._steps[step.layer] += 1
        used_in[step.selected] = self._steps[step.layer]
        return Choice(step.selected, near=frozenset(missing[self._num_fetched(len(missing)) :]))

    def _num_fetched(self, misses: int) -> int:
        if self.most:
            return self.most
        share = min(1.0, round(self.ratio * 65536) / 65536)
        few = floor(misses * share)
        times = [max(f * (1 - share), (misses - f) * share) for f in (few, few + 1)]
        return few + (times[1] < times[0])

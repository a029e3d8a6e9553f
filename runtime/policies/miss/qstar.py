"""Share the misses between the link and the near tier, so that both finish together (FreeToken's
q*; lossless)."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from runtime.policies.base import Choice, Residents, Simple, Step


@dataclass
class QStar(Simple):
    """Fetches f of the m missing experts and computes m - f near. f minimises `max(f / ratio,
    near)`, where `near` is the sum of `max(1, tokens of the expert / tokens)` over the experts
    computed near. `tokens` is how many tokens the near tier computes while it reads an expert.

    `ratio` is the bandwidth of the link over that of the near tier, so that both terms are times,
    in near experts. Equal times go to the larger f, which fills the cache. The experts with the
    most tokens are fetched, the first wanted among equals: for a single token, the strongest. If
    the near tier takes longer, prefetches may use what is left of the link.
    """

    name: ClassVar[str] = "qstar"

    ratio: float = 0.5
    tokens: float = inf

    def __post_init__(self) -> None:
        if not self.tokens > 0:
            raise BadUsage(f"{self.name} needs tokens above 0, not {self.tokens}")
        if self.ratio is not None and not 0 < self.ratio < inf:
            raise BadUsage(
                f"{self.name} needs a ratio of link to near bandwidth above 0, not {self.ratio}"
            )

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = residents.missing(step)
        each = self._near_times(missing, step)
        fetched = self.num_fetched(each)
        near_time = float(each[fetched:].sum())
        return Choice(
            step.selected,
            near=frozenset(missing[fetched:]),
            lent=max(0.0, near_time * self.ratio - fetched),
        )

    def num_fetched(self, each: np.ndarray, *, busy: float = 0.0, near_time: float = 0.0) -> int:
        """Return f, given the near tier's time for each miss, `each` [m], in reads of an expert,
        beside `near_time` that it computes anyway. `busy` is the part of an expert that the link
        has to move before any of them."""
        fetched = np.arange(len(each), -1, -1)
        link = (fetched + busy * (fetched > 0)) / self.ratio
        left = np.append(0.0, each[::-1].cumsum())  # of the last 0, 1, ... of them
        return int(fetched[np.maximum(link, left + near_time).argmin()])

    def _near_times(self, missing: list[int], step: Step) -> np.ndarray:
        if self.tokens == inf or len(step.selected) == 1:
            return np.ones(len(missing))
        counts = np.bincount(
            step.selected[step.selected >= 0], minlength=max(missing, default=0) + 1
        )
        return np.maximum(1.0, counts[missing] / self.tokens)

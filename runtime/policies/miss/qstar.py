"""Share the misses between the link and the near tier, so that both finish together (FreeToken's q*; lossless)."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from runtime.policies.base import Choice, Residents, Simple, Step


@dataclass
class QStar(Simple):
    """Of m missing experts f are fetched and m - f computed near: the f that minimises `max(f / ratio, m - f)`.

    `ratio` is the bandwidth of the link over that of the near tier, so that both terms are times, in near experts.
    Equal times go to the larger f, which fills the cache. The first wanted are fetched: in a decode step, the
    strongest. If the near tier takes longer, prefetches may use what is left of the link.
    """

    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.ratio < float("inf"):
            raise BadUsage(f"qstar needs a ratio of link to near bandwidth above 0, not {self.ratio}")

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = residents.missing(step)
        fetched = self.num_fetched(len(missing))
        near = frozenset(missing[fetched:])
        return Choice(step.selected, near=near, lent=max(0.0, len(near) * self.ratio - fetched))

    def num_fetched(self, num_missing: int) -> int:
        """Return f for `num_missing` misses."""
        fetched = np.arange(num_missing, -1, -1)
        return int(fetched[np.maximum(fetched / self.ratio, num_missing - fetched).argmin()])

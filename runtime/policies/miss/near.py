"""Compute a missing expert where it lies, on the near tier (Fiddler, KTransformers; lossless)."""

from dataclasses import dataclass

from artifacts.errors import BadUsage
from runtime.policies.base import Choice, Residents, Simple, Step
from runtime.policies.step import fitting


@dataclass
class NearMiss(Simple):
    """Computes missing experts in the near tier. With `fill`, a missing expert is fetched while its
    scope has an empty slot, so that a cold cache fills. An expert that is under way is waited for,
    or with `waits=no` computed near as well.

    `ratio` is the bandwidth of the link over that of the near tier: prefetches may use the bytes
    that the link can move while near experts are computed. At 0 they may not.
    """

    fill: bool = True
    ratio: float = 0.0
    waits: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < float("inf"):
            raise BadUsage(
                f"near needs a ratio of link to near bandwidth of at least 0, not {self.ratio}"
            )

    @property
    def every_step(self) -> bool:
        return not self.waits

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = residents.missing(step)
        fetched = (
            fitting(missing, residents.num_free) if self.fill and any(residents.num_free) else ()
        )
        near = frozenset(missing).difference(fetched)
        lent = max(0.0, len(near) * self.ratio - len(fetched))
        if not self.waits:
            near = near.union(residents.coming(step))
        return Choice(step.selected, near=near, lent=lent)

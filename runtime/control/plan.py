"""What the controller asks the engine to do for one step, and nothing about how.

Nobody changes what is made here; frozen it would take three times as long to make, at every step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from artifacts.shape import FULL_BITS

NO_SLOT = -1


@dataclass(slots=True)
class Place:
    """One expert, or a segment of one that is `share` of it, the slot it has or is to come into, and the precision of
    the replica there.

    Without a slot it is computed near its memory, or on the replica that stays in the fast tier.
    """

    key: int
    slot: int
    bits: int = FULL_BITS
    share: float = 1.0


@dataclass(slots=True)
class Wave:
    """Experts that share the fast tier: `resident` start at once, or when they land; `loads` come over the link,
    each as soon as its slot is free."""

    resident: tuple[Place, ...]
    loads: tuple[Place, ...]


@dataclass(slots=True)
class Plan:
    """One step. `selected` [T, K]: the expert of each rank, -1 for none; `weights` replaces the router's if given.

    What it uses is in a wave, `near`, or `low`: computed at once on the replica that stays in the fast tier.
    """

    layer: int
    selected: np.ndarray
    weights: np.ndarray | None
    waves: tuple[Wave, ...]
    near: tuple[Place, ...]
    low: tuple[Place, ...]
    prefetches: tuple[Place, ...]

    def in_turn(self) -> Iterator[tuple[Wave, dict[int, Place]]]:
        """Each wave, and by slot the loads of the next one: what lies in the slots is computed first."""
        for wave, after in zip(self.waves, (*self.waves[1:], None), strict=False):
            yield wave, {load.slot: load for load in after.loads} if after else {}

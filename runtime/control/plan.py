"""Plan of one step: what the controller asks the engine to do.

These objects are never changed after they are made; a frozen dataclass would take three times as
long to make, at every step.
"""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import FULL_BITS

NO_SLOT = -1


@dataclass(slots=True)
class Place:
    """One expert, or a segment that is `share` of it, its slot, and the precision of the replica
    there.

    Without a slot it is computed in the near tier, or on its resident replica.
    """

    key: int
    slot: int
    bits: int = FULL_BITS
    share: float = 1.0


@dataclass(slots=True)
class Wave:
    """Experts that share the fast tier: `resident` start at once, or when they arrive; `loads` come
    over the link, each as soon as its slot is free."""

    resident: tuple[Place, ...]
    loads: tuple[Place, ...]


@dataclass(slots=True)
class Plan:
    """One step. `selected` [T, K]: the expert of each rank, -1 for none; `weights` replaces the
    router's weights if given.

    The experts in slots into which the next wave loads are computed first.
    Every expert used is in a wave, in `near`, or in `low`, which is computed at once on resident
    replicas. Two fields hold what the link brings ahead of its use. `placed` is sent for before
    anything is computed, because any wave may use it. `prefetches` are issued behind the last
    wave's loads, into slots that it leaves alone, or before any if `is_ahead`.
    """

    layer: int
    selected: np.ndarray
    weights: np.ndarray | None
    waves: tuple[Wave, ...]
    near: tuple[Place, ...]
    low: tuple[Place, ...]
    prefetches: tuple[Place, ...]
    is_ahead: bool = False
    placed: tuple[Place, ...] = ()

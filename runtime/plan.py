"""What the controller asks the engine to do for one step, and nothing about how."""

from dataclasses import dataclass

import numpy as np

FULL_BITS = 16  # the checkpoint's own precision, whatever its dtype


@dataclass(frozen=True, slots=True)
class Place:
    """One expert and the slot it has, or is to come into, and the precision of the replica there."""

    key: int
    slot: int
    bits: int = FULL_BITS

    def nbytes(self, expert_nbytes: int) -> int:
        """Of `expert_nbytes` at full precision, the share that this replica has."""
        return expert_nbytes * self.bits // FULL_BITS


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts that share the fast tier: `resident` start at once, or when they land; `loads` come over the link."""

    resident: tuple[Place, ...]
    loads: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `selected` [T, K]: the expert of each rank, -1 for none; `weights` replaces the router's if given."""

    layer: int
    selected: np.ndarray
    weights: np.ndarray | None
    waves: tuple[Wave, ...]
    near: tuple[int, ...]
    prefetches: tuple[Place, ...]

"""What the controller asks the engine to do for one step, and nothing about how."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Place:
    """One expert and the slot it has, or is to come into."""

    key: int
    slot: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts that share the fast tier: `resident` can start at once (or when they land), `loads` come over the link
    first."""

    resident: tuple[Place, ...]
    loads: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `selected` [T, K]: the expert that serves each rank, -1 for none; `weights` replaces the router's if
    given."""

    layer: int
    selected: np.ndarray
    weights: np.ndarray | None
    waves: tuple[Wave, ...]
    near: tuple[int, ...]
    prefetches: tuple[Place, ...]

"""The fast tier as pools: slots of one size, and the keys that may have them."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape


@dataclass(frozen=True, slots=True)
class Pool:
    """Keys from `first` up to `stop` share `num_slots` slots of `slot_nbytes`; those of a pool that `is_passing` are
    left to whom they serve at the moment, the oldest first, and no eviction policy is asked about them."""

    first: int
    stop: int
    num_slots: int
    slot_nbytes: int
    is_passing: bool = False


def whole_experts(shape: Shape, capacities: np.ndarray, *, is_global: bool) -> tuple[Pool, ...]:
    """One pool for all layers, or one each, of so many experts [L]."""
    if is_global:
        return (Pool(0, shape.num_keys, int(capacities.sum()), shape.expert_nbytes),)
    return tuple(
        Pool(layer * shape.num_experts, (layer + 1) * shape.num_experts, capacity, shape.expert_nbytes)
        for layer, capacity in enumerate(capacities.tolist())
    )

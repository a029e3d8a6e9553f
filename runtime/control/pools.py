"""The fast tier as pools: slots of one size, and the keys that may have them."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape


@dataclass(frozen=True, slots=True)
class Pool:
    """Keys from `first` up to `stop`, of whole layers, that belong to a device share `num_slots` slots of `slot_nbytes`
    there; those of a pool that `is_passing` are left to whom they serve at the moment, the oldest first, and no
    eviction policy is asked about them."""

    first: int
    stop: int
    num_slots: int
    slot_nbytes: int
    is_passing: bool = False
    device: int = 0


def whole_experts(shape: Shape, capacities: np.ndarray, *, is_global: bool) -> tuple[Pool, ...]:
    """On each device one pool for all layers, or one each, of so many experts [L, N]."""
    if is_global:
        totals = capacities.sum(axis=0).tolist()
        return tuple(
            Pool(0, shape.num_keys, count, shape.expert_nbytes, device=device) for device, count in enumerate(totals)
        )
    return tuple(
        Pool(layer * shape.num_experts, (layer + 1) * shape.num_experts, count, shape.expert_nbytes, device=device)
        for layer, own in enumerate(capacities.tolist())
        for device, count in enumerate(own)
    )

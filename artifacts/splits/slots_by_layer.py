"""Number of experts that each layer should hold, by dynamic programming over the demand loads that
each number leaves.

(AdapMoE: adaptive sensitivity-based expert gating and management, Zhong et al., ICCAD 2024.)
"""

import numpy as np

from artifacts.errors import BadUsage


def loads_on_demand(
    hit: np.ndarray, prediction: np.ndarray, prediction_hit: np.ndarray, k: int
) -> np.ndarray:
    """Return [L, E + 1] demand loads per token in each layer, by the number of experts that the
    layer holds.

    A token's k experts need a demand load unless they are held, hit [L, E + 1], or prefetched in
    time. An expert is prefetched if it was not held but among the k predicted: prediction [L, Y],
    prediction_hit [L, Y, E + 1].
    """
    foreseen = (prediction[:, :k, None] * (1 - prediction_hit[:, :k])).sum(axis=1)
    return np.maximum(0.0, k * (1 - hit) - foreseen)


def fewest_loads(loads: np.ndarray, num_slots: int) -> np.ndarray:
    """Return the experts [L] that each layer holds, at least one each and `num_slots` in all, with
    the least sum of loads [L, E + 1]. Of equal sums the first found gives lower layers more. Raises
    BadUsage when this is impossible."""
    num_layers = len(loads)
    most = loads.shape[1] - 1
    if not num_layers <= num_slots <= num_layers * most:
        raise BadUsage(
            f"{num_slots} slots cannot be from 1 to {most} in each of {num_layers} layers"
        )
    best = np.full(num_slots + 1, np.inf)
    best[0] = 0.0
    chosen = np.zeros((num_layers, num_slots + 1), np.int64)
    for layer, layer_loads in enumerate(loads):
        before = best
        best = np.full(num_slots + 1, np.inf)
        for size in range(1, min(most, num_slots) + 1):
            total = before[: num_slots + 1 - size] + layer_loads[size]
            is_better = total < best[size:]
            best[size:][is_better] = total[is_better]
            chosen[layer, size:][is_better] = size
    held = np.zeros(num_layers, np.int64)
    for layer in range(num_layers - 1, -1, -1):
        held[layer] = chosen[layer, num_slots]
        num_slots -= held[layer]
    return held

"""The compiled loops of the policies named map; they round as plain Python does.

Shapes: R requests, N keys, E experts.
"""

import numpy as np

from artifacts.common.numba_loops import kernel


@kernel("void(float32[:, ::1], float64[::1], float64[::1])", exact=True)
def weigh(said, uses, worth):
    """Set `worth` [N] to the mean over the requests of the matched maps' probabilities `said` [R, N], times `uses`
    [N]."""
    for key in range(len(worth)):
        worth[key] = said[0, key]
    if len(said) > 1:
        for request in range(1, len(said)):
            for key in range(len(worth)):
                worth[key] += said[request, key]
        for key in range(len(worth)):
            worth[key] /= len(said)
    for key in range(len(worth)):
        worth[key] *= uses[key]


@kernel("int64[::1](float32[::1], float64, int64)", exact=True)
def likeliest(probabilities, score, top_k):
    """Compute `artifacts.routing.expert_maps.selected`."""
    order = (-probabilities).argsort(kind="mergesort")
    delta, total = min(max(1.0 - score, 0.0), 1.0), 0.0
    for place in range(len(order)):
        total += np.float64(probabilities[order[place]])
        if total >= delta and place + 1 >= top_k:
            return order[: place + 1]
    return order

"""The compiled loops of the policies named map; they round as plain Python does.

Shapes: R requests, N keys, E experts.
"""

import numpy as np

from artifacts.common.numba_loops import kernel


@kernel(
    "void(float32[:, ::1], int64, int64, float64, float64, float64[::1], float64[::1])", exact=True
)
def weigh(said, first, stop, scale, least, uses, worth):
    """Set `worth` [N] to `uses` [N], multiplied from key `first` up to `stop` by a factor: `scale`
    times the mean of the matched maps' probabilities `said` [R, N] over the requests, but at least
    `least`."""
    for key in range(len(worth)):
        worth[key] = uses[key]
    for key in range(first, stop):
        total = 0.0
        for request in range(len(said)):
            total += said[request, key]
        worth[key] = max(total / len(said) * scale, least) * uses[key]


@kernel("int64[::1](float32[::1], float64, int64)", exact=True)
def likeliest(probabilities, score, top_k):
    """Compute `artifacts.routing.expert_maps.selected`."""
    order = (-probabilities).argsort(kind="mergesort")
    delta = min(max(1.0 - score, 0.0), 1.0)
    total = 0.0
    for place in range(len(order)):
        total += np.float64(probabilities[order[place]])
        if total >= delta and place + 1 >= top_k:
            return order[: place + 1]
    return order

"""Who leaves first, compiled: for eviction policies whose sort key lies ready."""

import numpy as np

from artifacts.kernels import kernel

_RESIDENT = np.uint8(2)  # as runtime.cache has it


@kernel("int64(float64[::1], uint8[::1], boolean[::1], int64, int64, int64[::1])")
def first_leaving(ranks, state, pinned, start, stop, found):
    """Of keys from `start` up to `stop` that are resident and not pinned as many as `found` has room for, the smallest
    of `ranks` first, equals by the lower key; returns how many there are."""
    num_found = 0
    for key in range(start, stop):
        if state[key] != _RESIDENT or pinned[key]:
            continue
        if num_found == len(found) and ranks[key] >= ranks[found[num_found - 1]]:
            continue
        at = min(num_found, len(found) - 1)
        while at > 0 and ranks[found[at - 1]] > ranks[key]:
            found[at] = found[at - 1]
            at -= 1
        found[at] = key
        num_found = min(num_found + 1, len(found))
    return num_found

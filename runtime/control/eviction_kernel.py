"""Who leaves first, compiled: for eviction policies whose sort keys lie ready."""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel

_RESIDENT = np.uint8(2)  # as runtime.control.cache has it


@exact_part
def _leaves_before(key, other, ranks, older):
    """A key after the other in number."""
    return ranks[key] < ranks[other] or (ranks[key] == ranks[other] and older[key] < older[other])


@kernel("int64(float64[::1], int64[::1], uint8[::1], boolean[::1], int64, int64, int64[::1])", exact=True)
def first_leaving(ranks, older, state, pinned, start, stop, found):
    """Of keys from `start` up to `stop` that are resident and not pinned as many as `found` has room for, the smallest
    of `ranks` first, equals by `older`, then by the lower key; returns how many there are."""
    rank, states, is_pinned = ranks[start:stop], state[start:stop], pinned[start:stop]
    # Who stays is ranked last, without a branch: a processor would guess wrong for every fourth key.
    rank_of, num_found, most = np.empty(len(rank)), 0, np.inf
    for place in range(len(rank)):
        rank_of[place] = rank[place] if (states[place] == _RESIDENT) & (not is_pinned[place]) else np.inf
    for place in range(len(rank)):
        if rank_of[place] > most or states[place] != _RESIDENT or is_pinned[place]:
            continue
        key = start + place
        if num_found == len(found) and not _leaves_before(key, found[num_found - 1], ranks, older):
            continue
        at = min(num_found, len(found) - 1)
        while at > 0 and _leaves_before(key, found[at - 1], ranks, older):
            found[at] = found[at - 1]
            at -= 1
        found[at] = key
        num_found = min(num_found + 1, len(found))
        if num_found == len(found):
            most = ranks[found[num_found - 1]]
    return num_found

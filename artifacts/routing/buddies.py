"""Buddy lists (BuddyMoE): for each expert, the pivot, the peers that may replace it, best first."""

import numpy as np

# Far below any difference between counts, far above the rounding error of a sum of some hundred
# shares.
_ROUND_OFF = 1e-12


def buddy_lists(q: np.ndarray, alpha: float, k_max: int) -> list[list[int]]:
    """E lists of expert ids from `q` [E, E], whose row i holds the shares of i's companions.

    Peers are sorted by falling q, ties by the lower id; a list is the shortest prefix whose q sums
    to at least `alpha`, cut at `k_max`. An active pivot has at least one buddy, a pivot without
    companions has none, and a peer with q = 0 is no buddy.
    """
    assert k_max >= 1, k_max
    return [
        _buddies(row, pivot, alpha, k_max)
        for pivot, row in enumerate(np.asarray(q, dtype=np.float64))
    ]


def buddy_table(lists: list[list[int]]) -> np.ndarray:
    """[E, R] int64: the lists as rows, padded with -1 to the longest (R is at least 1)."""
    longest = max(1, *map(len, lists)) if lists else 1
    return np.array(
        [buddies + [-1] * (longest - len(buddies)) for buddies in lists], dtype=np.int64
    )


def _buddies(row: np.ndarray, pivot: int, alpha: float, k_max: int) -> list[int]:
    order = np.argsort(-row, kind="stable")
    peers = order[(row[order] > 0) & (order != pivot)]
    reached = np.cumsum(row[peers]) >= alpha - _ROUND_OFF
    needed = int(reached.argmax()) + 1 if reached.any() else len(peers)
    return peers[: min(needed, k_max)].tolist()

"""Token activating entropy (BuddyMoE): how undecided the router was among the experts it
selected."""

import math

import numpy as np

from artifacts.routing.coactivation import renormalised

NUM_PERCENTILES = 101


def token_entropy(weights: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
    """TAE [T] float64 in [0, 1] of `weights` [T, k]: `-sum p~ ln p~ / ln k`; 0 for k = 1.

    A temperature divides the selected logits, which equals renormalising p~ ** (1 / temperature).
    """
    assert temperature > 0, temperature
    share = renormalised(weights)
    num_selected = share.shape[1]
    if num_selected == 1:
        return np.zeros(len(share))
    if temperature != 1.0:
        share = renormalised(share ** (1 / temperature))
    # Where p is 0, the term p ln p is 0: the log of 1 replaces the log of 0.
    terms = share * np.log(np.where(share > 0, share, 1.0))
    return np.clip(-terms.sum(axis=1) / math.log(num_selected), 0.0, 1.0)


class EntropyHistogram:
    """Additive counts of values in [0, 1], fine enough for percentiles of three decimals."""

    NUM_BINS = 4096

    def __init__(self) -> None:
        self.counts = np.zeros(self.NUM_BINS, dtype=np.int64)

    def update(self, values: np.ndarray) -> None:
        """Add `values` [T], each in [0, 1]."""
        bins = np.minimum((np.asarray(values) * self.NUM_BINS).astype(np.int64), self.NUM_BINS - 1)
        self.counts += np.bincount(bins, minlength=self.NUM_BINS)

    def merge(self, other: "EntropyHistogram") -> None:
        """Add the counts of `other`."""
        self.counts += other.counts

    def percentiles(self) -> np.ndarray:
        """[101] float32: the value below which 0, 1 .. 100 % of all values lie, interpolated within
        a bin."""
        total = int(self.counts.sum())
        assert total > 0, "percentiles of no values"
        filled = np.flatnonzero(self.counts)
        upper = np.cumsum(self.counts[filled])
        # Each filled bin is a line segment: from (count below, lower edge) to (count below plus its
        # own, upper edge).
        below = np.stack([upper - self.counts[filled], upper], axis=1).ravel()
        edges = np.stack([filled, filled + 1], axis=1).ravel() / self.NUM_BINS
        wanted = np.linspace(0.0, 1.0, NUM_PERCENTILES) * total
        return np.interp(wanted, below, edges).astype(np.float32)

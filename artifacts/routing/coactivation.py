"""Counts of experts of a layer that are selected together; shards merge to the same bits in any
order."""

from functools import reduce

import numpy as np

from artifacts.errors import BadInput

# Weights are rounded to multiples of 2^-24 before they are added. A float64 holds every such
# multiple up to 2^29 without rounding, so the sums over up to 2^29 tokens are exact, and exact sums
# do not depend on the order of adding.
_GRAIN = 2.0**24


class NotFiniteWeights(BadInput):
    """A router gave NaN, infinity or less than 0, as it does where the numbers before it are not
    finite."""


class Coactivation:
    """Additive statistics of one layer's routing; E experts, k selected per token, T tokens per
    update.

    `pairs` [E, E] int64 (M): tokens that selected both i and j, i != j. `weighted` [E, E] float64
    (W): the sum over those tokens of min(p~_i, p~_j), p~ being the routing weights renormalised
    over the selected experts. Both matrices are symmetric, with zero diagonals.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.pairs = np.zeros((num_experts, num_experts), dtype=np.int64)
        self.weighted = np.zeros((num_experts, num_experts), dtype=np.float64)

    def update(self, selected: np.ndarray, weights: np.ndarray) -> None:
        """Add tokens: `selected` [T, k] distinct expert ids, `weights` [T, k] their non-negative
        routing weights."""
        selected = np.asarray(selected).astype(np.int64)
        assert selected.shape == np.shape(weights), (selected.shape, np.shape(weights))
        if not selected.size:
            return
        lowest = int(selected.min())
        highest = int(selected.max())
        assert lowest >= 0 and highest < self.num_experts, (
            f"expert ids {lowest} to {highest} outside the layer"
        )
        self._add_pairs(selected, additive_shares(weights))

    def merge(self, other: "Coactivation") -> None:
        """Add the counts of `other`."""
        assert other.num_experts == self.num_experts, (other.num_experts, self.num_experts)
        self.pairs += other.pairs
        self.weighted += other.weighted

    def _add_pairs(self, selected: np.ndarray, share: np.ndarray) -> None:
        first, second = np.triu_indices(selected.shape[1], k=1)
        cell = (selected[:, first] * self.num_experts + selected[:, second]).ravel()
        lesser = np.minimum(share[:, first], share[:, second]).ravel()
        shape = self.pairs.shape
        num_cells = self.pairs.size
        count = np.bincount(cell, minlength=num_cells).reshape(shape)
        weight = np.bincount(cell, weights=lesser, minlength=num_cells).reshape(shape)
        np.fill_diagonal(count, 0)  # of a router that names an expert twice
        np.fill_diagonal(weight, 0)
        self.pairs += count + count.T
        self.weighted += weight + weight.T


def additive_shares(weights: np.ndarray) -> np.ndarray:
    """p~ [T, k] float64, rounded so that sums over up to 2^29 tokens are exact in any order of
    adding."""
    return np.rint(renormalised(weights) * _GRAIN) / _GRAIN


def renormalised(weights: np.ndarray) -> np.ndarray:
    """p~ [T, k] float64: each row of `weights` [T, k] divided by its sum; a row of zeros becomes
    equal shares.

    Raises NotFiniteWeights.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise NotFiniteWeights(
            "a router gives NaN or infinity: the weights are damaged, or too large for their dtype"
        )
    # Summed rank by rank: the order of numpy's own sum, and so its last bit, depends on the memory
    # layout.
    total = reduce(np.add, weights.T)[:, None]
    return np.divide(
        weights, total, out=np.full_like(weights, 1 / weights.shape[1]), where=total > 0
    )


def conditional(pairs: np.ndarray, epsilon: float = 0.0) -> np.ndarray:
    """q [E, E]: `q[i, j]` is the share of j among the companions of i.

    `pairs` [E, E] are counts or weights; their diagonal is ignored. `epsilon` is added to every
    companion. The row of a pivot that was never active stays zero.
    """
    counts = np.array(pairs, dtype=np.float64)
    np.fill_diagonal(counts, 0.0)
    is_active = counts.any(axis=1)
    counts[is_active] += epsilon
    np.fill_diagonal(counts, 0.0)
    total = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)

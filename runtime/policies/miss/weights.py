"""Routing weights after ranks were dropped or replaced."""

import numpy as np


def keep_sum(weights: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """[T, K] weights: dropped ranks (selected -1) at zero, the others scaled so that each token keeps its sum."""
    kept = np.where(selected < 0, 0, weights)
    total = kept.sum(axis=1, keepdims=True)
    return kept * np.divide(weights.sum(axis=1, keepdims=True), total, out=np.zeros_like(total), where=total > 0)

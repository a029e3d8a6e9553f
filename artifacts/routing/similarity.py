"""The loss when one expert replaces another, measured on a sample of tokens, and scores for buddy
lists."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Identical experts would have an infinite score; losses below this share of the median count as
# equal.
_LEAST_LOSS = 1e-6


@dataclass(frozen=True, slots=True)
class Similarity:
    """Similarity of the experts of every layer, over a sample of tokens. `cosine` [L, E, E]: mean
    over the sampled tokens of the cosine of both experts' outputs.

    `loss` [L, E, E]: mean squared change of the layer's output when j replaces i, over the sampled
    tokens that were routed to i, with their routing weights. `left_out` [L, E]: the same when i is
    left out. `samples` [L, E] counts those tokens; an expert without any borrows all sampled
    tokens. Diagonals are 1 and 0.
    """

    cosine: np.ndarray
    loss: np.ndarray
    left_out: np.ndarray
    samples: np.ndarray

    @classmethod
    def stack(cls, layers: Sequence["Similarity"]) -> "Similarity":
        """Join single layers to all layers."""
        return cls(
            *(np.concatenate([getattr(layer, name) for layer in layers]) for name in cls.__slots__)
        )

    @classmethod
    def merge(cls, shards: Sequence["Similarity"]) -> "Similarity":
        """Merge several samples, each weighted by its tokens. Borrowed tokens count only where all
        samples borrowed."""
        tokens = [shard.samples.sum(axis=1)[:, None] for shard in shards]
        served = [shard.samples for shard in shards]
        is_unrouted = sum(served) == 0
        served = [
            np.where(is_unrouted, total, routed)
            for total, routed in zip(tokens, served, strict=True)
        ]
        return cls(
            _mean([shard.cosine for shard in shards], [total[:, :, None] for total in tokens]),
            _mean([shard.loss for shard in shards], [routed[:, :, None] for routed in served]),
            _mean([shard.left_out for shard in shards], served),
            sum(shard.samples for shard in shards),
        )


def output_scores(cosine: np.ndarray) -> np.ndarray:
    """q [E, E] from cosines [E, E]: `1 + cosine`, each row divided by its sum; highest for the
    highest cosine."""
    return _shares(1 + np.clip(cosine, -1, 1))


def loss_scores(loss: np.ndarray) -> np.ndarray:
    """q [E, E] from losses [E, E]: `1 / loss`, each row divided by its sum; highest for the lowest
    loss."""
    if len(loss) == 1:
        return np.zeros(loss.shape)
    peers = loss[~np.eye(len(loss), dtype=bool)].reshape(len(loss), -1)
    least = _LEAST_LOSS * np.median(peers, axis=1, keepdims=True)
    return _shares(1 / np.maximum(loss, np.where(least > 0, least, 1.0)))


def _mean(values: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> np.ndarray:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _shares(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    np.fill_diagonal(scores, 0.0)
    total = scores.sum(axis=1, keepdims=True)
    return np.divide(scores, total, out=np.zeros_like(scores), where=total > 0)

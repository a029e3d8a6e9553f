"""The pairs of a step of many tokens, sorted by expert and cut into tiles for the GPU kernels."""

from collections.abc import Mapping

import numpy as np


class SortedPairs:
    """The pairs of a step by expert. A pair is a token and a rank, numbered T * K; `order` int32 [T
    * K] sorts pairs by expert, pairs without one first."""

    def __init__(self, experts: np.ndarray) -> None:
        """`experts` [T, K], -1 for none."""
        pairs = experts.ravel()
        order = np.argsort(pairs, kind="stable")
        distinct, first, counts = np.unique(pairs[order], return_index=True, return_counts=True)
        self.order = order.astype(np.int32)
        self._spans = {
            expert: span
            for expert, *span in zip(
                distinct.tolist(), first.tolist(), counts.tolist(), strict=True
            )
        }

    def tiles(self, numbers: Mapping[int, int], size: int) -> np.ndarray:
        """Return int32 [n, 3]: the expert's number, the tile's first pair in `order`, and its
        pairs, at most `size`.

        `numbers` by expert. The tiles of one expert are adjacent.
        """
        tiles = []
        for expert, number in numbers.items():
            first, count = self._spans[expert]
            tiles += [(number, first + at, min(size, count - at)) for at in range(0, count, size)]
        return np.array(tiles, np.int32)

"""The pairs of a step of many tokens sorted by expert, and cut into tiles, as kernels for a GPU take them."""

from collections.abc import Mapping

import numpy as np


class Groups:
    """A pair is a token and a rank, numbered T * K; `order` int32 [T * K] has them by expert, those of none first."""

    def __init__(self, experts: np.ndarray) -> None:
        """`experts` [T, K], -1 for none."""
        pairs = experts.ravel()
        order = np.argsort(pairs, kind="stable")
        own, first, counts = np.unique(pairs[order], return_index=True, return_counts=True)
        self.order = order.astype(np.int32)
        self._spans = {
            expert: span for expert, *span in zip(own.tolist(), first.tolist(), counts.tolist(), strict=True)
        }

    def tiles(self, numbers: Mapping[int, int], size: int) -> np.ndarray:
        """int32 [n, 3]: number of the expert, first of its pairs in `order`, and how many, at most `size`; `numbers` by
        expert. The tiles of one expert follow each other."""
        found = []
        for expert, number in numbers.items():
            first, count = self._spans[expert]
            found += [(number, first + at, min(size, count - at)) for at in range(0, count, size)]
        return np.array(found, np.int32)

"""The widths of replicas, in bits: the one table that recipes, losses, kernels, counters and command lines share."""

from collections.abc import Sequence

import numpy as np

from artifacts.shape import FULL_BITS

WIDTHS = (1, 2, 3, 4, 8)
"""Ascending: the columns of every loss table."""

USUAL_WIDTHS = WIDTHS[:4]
"""What `moectl quantize` makes unless it is told otherwise, and the prefix split gives out: 1, 2, 3 and 4."""

BASES = (FULL_BITS, *reversed(WIDTHS[1:]))
"""What can stand for full precision: on a base of 1 bit no narrower replica would remain."""


def column_of(bits: int) -> int:
    """The column of a width in a loss table."""
    return WIDTHS.index(bits)


def columns_of(bits: Sequence[int] | np.ndarray) -> np.ndarray:
    """The columns of several widths, in any shape; all must be in `WIDTHS`."""
    found = np.searchsorted(WIDTHS, bits)
    assert np.isin(bits, WIDTHS).all(), bits
    return found


def listed(widths: Sequence[int] = WIDTHS, *, last: str = ", ") -> str:
    """Widths for a sentence: `1, 2, 3, 4, 8`, or with ` or ` before the last one."""
    texts = [*map(str, widths)]
    return last.join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))

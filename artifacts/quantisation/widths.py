"""The widths of replicas, in bits: the one table that recipes, losses, kernels, counters and
command lines share."""

from collections.abc import Sequence

import numpy as np

from artifacts.shape import FULL_BITS

Width = int | float
"""Bits a weight: whole ones are ints. GPTQ's recipes count the bits of a code, trellis codes the
bits of all tensors."""

SCALAR_WIDTHS = (1, 2, 3, 4, 8)
"""Widths that GPTQ's recipes make, and exported checkpoints have."""

TRELLIS_WIDTHS = (0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4)

NOTHING = 0
"""The width of an expert that is left out: it adds nothing to its layer."""

WIDTHS = (NOTHING, *sorted({*SCALAR_WIDTHS, *TRELLIS_WIDTHS}))
"""Ascending: the columns of every loss table."""

MADE_WIDTHS = WIDTHS[1:]
"""Widths that replicas may have."""

USUAL_WIDTHS = SCALAR_WIDTHS[:4]
"""Widths that GPTQ's recipes make unless they are told otherwise, and the prefix split gives out:
1, 2, 3 and 4."""

BASES = (FULL_BITS, *reversed(SCALAR_WIDTHS[1:]))
"""Widths that can stand for full precision: on a base of 1 bit no narrower replica would remain."""


def as_width(bits: float | str) -> Width:
    """A number of bits as a width. Raises ValueError for text that is no number."""
    number = float(bits)
    return int(number) if number.is_integer() else number


def label(bits: Width) -> str:
    """A width in names: `2`, or `1_25`."""
    return str(as_width(bits)).replace(".", "_")


def column_of(bits: Width) -> int:
    """The column of a width in a loss table."""
    return WIDTHS.index(bits)


def columns_of(bits: Sequence[Width] | np.ndarray) -> np.ndarray:
    """The columns of several widths, in any shape; all must be in `WIDTHS`."""
    found = np.searchsorted(WIDTHS, bits)
    assert np.isin(bits, WIDTHS).all(), bits
    return found


def listed(widths: Sequence[Width] = SCALAR_WIDTHS, *, last: str = ", ") -> str:
    """Widths for a sentence: `1, 2, 3, 4, 8`, or with ` or ` before the last one."""
    texts = [*map(str, widths)]
    return last.join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))

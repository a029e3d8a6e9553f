"""Blocks of 16 rows of trellis codes for processors without table look-ups in vectors. Importing
this module imports numba.

A block's place is a tuple. It has the half bits, whether the block begins in the middle of its
first word, the address of that word, and the bytes between two rows of words. Then follow the
number of these rows from it on and in all, and the number of columns.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import part
from runtime.kernels.cpu.gated import pointer

_WORD = np.zeros(1, np.uint16)
u32 = np.uint32


@part
def write_plainly(place, table, factor, out):
    """Write the numbers in `table` [2, 64] for the levels to out [16, .]."""
    half_bits, phase, words, stride, left, num_words, count = place
    for row in range(len(out)):
        index, shift = divmod(8 * phase + half_bits * row // 2, 16)
        second = index + 1 if index + 1 < left else index + 1 - num_words
        low = carray(
            pointer(words + stride * (index if index < left else index - num_words), _WORD),
            (count,),
        )
        high = carray(pointer(words + stride * second, _WORD), (count,))
        for column in range(count):
            window = u32(u32(low[column]) | u32(u32(high[column]) << u32(16))) >> u32(shift)
            out[row, column] = table[row & 1, (u32(window * u32(factor)) & u32(0xFFFF)) >> u32(10)]


@part
def add_plainly(place, table, factor, tokens, out):
    """Write the sums [V, 16] of the levels times `tokens` int16 [V, .]."""
    count = place[-1]
    levels = np.empty((out.shape[1], count), np.int16)
    write_plainly(place, table, factor, levels)
    for v in range(len(tokens)):
        for row in range(len(levels)):
            total = np.float32(0)
            for column in range(count):
                total += np.float32(levels[row, column]) * np.float32(tokens[v, column])
            out[v, row] = total

"""Matrices of 4-bit codes whose words have eight outputs of one input (AWQ), times one token. Importing this module
imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from artifacts.formats.awq import ORDER
from runtime.kernels.cpu.column_vectors import add_output_words, add_scaled_output_words, in_order
from runtime.kernels.cpu.gated import bits_of, part, pointer
from runtime.kernels.cpu.lanes import LANES
from runtime.kernels.cpu.published import (
    CODES,
    INT32_LIKE,
    INTEGERS_4,
    MATRIX,
    NUM_GROUPS,
    SCALE_TYPE,
    SCALES,
    TABLES,
    WIDTH,
    ZEROS,
    f32,
    i32,
    read_scales,
    u32,
)

_PER_WORD = len(ORDER)
_PLACES = np.argsort(ORDER)
_PANEL = LANES * _PER_WORD  # outputs whose sums are kept in registers
_ROWS = 32  # of words that one panel of outputs takes before the next does


@part
def _as_bfloat16(x):
    token = np.empty(len(x), np.uint16)
    for k in range(len(x)):
        token[k] = np.uint16(bits_of(x[k]) >> u32(16))
    return token


@part
def _add_panels(words, first, end, token, sums):
    """Add codes less 8 of the inputs from `first` to `end` to the sums, which are of whole panels."""
    stride, table = 4 * words.shape[1], TABLES[INTEGERS_4].ctypes.data
    while first < end:
        num_rows, x = min(_ROWS, end - first), token[first:].ctypes.data
        for panel in range(0, len(sums), _PANEL):
            own = words[first, panel // _PER_WORD :].ctypes.data
            add_output_words(own, stride, x, table, num_rows // 2, sums[panel:].ctypes.data)
        first += num_rows
    in_order(sums.ctypes.data, len(sums) // _PANEL)


@part
def _add_row(words, first, x, sums):
    """Add codes less 8 of one input to sums [8, W], for the words from `first` on."""
    for place in range(_PER_WORD):
        own, shift = sums[place], u32(4 * place)
        for n in range(first, len(words)):
            own[n - first] += x * f32(i32(u32(u32(words[n]) >> shift) & u32(15)) - i32(8))


@part
def _add_others(words, zeros, first, x, scales, y):
    """Add what a group of inputs [W] gives for the words from `first` on."""
    sums = np.zeros((_PER_WORD, words.shape[1] - first), np.float32)
    for k in range(len(x)):
        _add_row(words[k], first, x[k], sums)
    _add_row(zeros, first, -x.sum(), sums)
    for n in range(sums.shape[1]):
        for i in range(_PER_WORD):
            output = _PER_WORD * (first + n) + i
            y[output] += scales[output] * sums[_PLACES[i], n]


@kernel(f"void({MATRIX})", nogil=True)
def multiply_output_words(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix in words [I, O / 8] to y [O]; output i of a word has place `ORDER.index(i)`."""
    width, num_groups, num_words = fields[WIDTH], fields[NUM_GROUPS], len(y) // _PER_WORD
    words = carray(pointer(start + fields[CODES], INT32_LIKE), (len(x), num_words))
    zeros = carray(pointer(start + fields[ZEROS], INT32_LIKE), (num_groups, num_words))
    num_fast = len(y) // _PANEL * _PANEL if is_narrow and width % 2 == 0 else 0
    token, scales, sums = _as_bfloat16(x), np.empty(len(y), np.float32), np.empty(num_fast, np.float32)
    for group in range(num_groups):
        begin, end = group * width, (group + 1) * width
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * len(y), -1, 0, scales)
        if num_fast:
            sums[:] = 0
            _add_panels(words, begin, end, token, sums)
            own = (zeros[group].ctypes.data, 0, scales.ctypes.data, x[begin:end].sum())
            add_scaled_output_words(*own, num_fast // LANES, sums.ctypes.data, y.ctypes.data)
        if num_fast < len(y):
            _add_others(words[begin:end], zeros[group], num_fast // _PER_WORD, x[begin:end], scales, y)

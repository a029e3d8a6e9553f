"""Matrices of 4-bit codes whose words have eight outputs of one input (AWQ), times one token.
Importing this module imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from artifacts.formats.awq import ORDER
from runtime.kernels.cpu.column_vectors import DIGITS, UNIT
from runtime.kernels.cpu.columns import MAX_WIDTH, in_digits
from runtime.kernels.cpu.gated import part, pointer
from runtime.kernels.cpu.lanes import LANES
from runtime.kernels.cpu.output_word_vectors import (
    OUTPUTS,
    add_output_words,
    add_scaled_output_words,
    in_order,
)
from runtime.kernels.cpu.published import (
    CODES,
    INT32_LIKE,
    MATRIX,
    NUM_GROUPS,
    SCALE_TYPE,
    SCALES,
    WIDTH,
    ZEROS,
    f32,
    i32,
    read_scales,
    u32,
)

_PER_WORD = len(ORDER)
_PLACES = np.argsort(ORDER)


@part
def _add_panels(words, first, digits, sums):
    """Write the sums of the codes of the inputs from `first` on, for whole panels of outputs."""
    sums[:] = 0
    for unit in range(len(digits)):
        for panel in range(0, len(sums) // DIGITS, OUTPUTS):
            own = words[first + unit * UNIT, panel // _PER_WORD :].ctypes.data
            add_output_words(
                own,
                4 * words.shape[1],
                digits[unit].ctypes.data,
                sums[DIGITS * panel :].ctypes.data,
            )
    in_order(sums.ctypes.data, len(sums) // DIGITS // OUTPUTS)


@part
def _add_row(words, first, x, sums):
    """Add x times the codes, less 8, of one input to sums [8, W], for the words from `first` on."""
    for place in range(_PER_WORD):
        own = sums[place]
        shift = u32(4 * place)
        for n in range(first, len(words)):
            own[n - first] += x * f32(i32(u32(u32(words[n]) >> shift) & u32(15)) - i32(8))


@part
def _add_others(words, zeros, first, x, scales, y):
    """Add the products of a group of inputs [W] to y, for the words from `first` on."""
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
    """Add x [I] times a matrix in words [I, O / 8] to y [O]; output i of a word has place
    `ORDER.index(i)`."""
    width = fields[WIDTH]
    num_groups = fields[NUM_GROUPS]
    num_words = len(y) // _PER_WORD
    words = carray(pointer(start + fields[CODES], INT32_LIKE), (len(x), num_words))
    zeros = carray(pointer(start + fields[ZEROS], INT32_LIKE), (num_groups, num_words))
    is_fast = is_narrow and width % UNIT == 0 and width <= MAX_WIDTH
    num_fast = len(y) // OUTPUTS * OUTPUTS if is_fast else 0
    digits, worth, sums_x = (
        in_digits(x, num_groups, width) if num_fast else in_digits(x[:0], 0, width)
    )
    scales = np.empty(len(y), np.float32)
    sums = np.empty(DIGITS * num_fast, np.int32)
    for group in range(num_groups):
        begin = group * width
        end = (group + 1) * width
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * len(y), -1, 0, scales)
        if num_fast:
            _add_panels(words, begin, digits[begin // UNIT : end // UNIT], sums)
            own = (zeros[group].ctypes.data, 0, scales.ctypes.data, worth[group], sums_x[group])
            add_scaled_output_words(*own, num_fast // LANES, sums.ctypes.data, y.ctypes.data)
        if num_fast < len(y):
            _add_others(
                words[begin:end], zeros[group], num_fast // _PER_WORD, x[begin:end], scales, y
            )

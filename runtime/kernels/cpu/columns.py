"""Matrices whose outputs lie side by side, in words down the inputs (GPTQ) or across the outputs (AWQ), times one
token. Importing this module imports numba.

The codes of a group are multiplied and summed for all outputs at once, before scales multiply the sums. Zero-points
take part as products with the sum of the group's x.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from artifacts.formats.awq import ORDER
from runtime.kernels.cpu.gated import bits_of, part, pointer
from runtime.kernels.cpu.lanes import LANES
from runtime.kernels.cpu.published import (
    BITS,
    CODES,
    INT32_LIKE,
    INTEGERS_4,
    MATRIX,
    NUM_GROUPS,
    SCALE_TYPE,
    SCALES,
    TABLES,
    WIDTH,
    ZERO_OFFSET,
    ZEROS,
    f32,
    group_of_columns,
    i32,
    read_scales,
    sums_of_groups,
    u32,
)
from runtime.kernels.cpu.vectors import (
    OUTPUT_ROWS,
    PANEL,
    WORD_ROWS,
    add_pairs_of_codes,
    add_rows_of_outputs,
    add_words_of_eight,
    add_words_of_four,
)

_PER_WORD = 8  # codes of 4 bits
_PLACES = np.argsort(ORDER)
_BLOCK = 1024  # outputs whose sums of all groups stay in a core's nearest cache


@part
def _add_groups(words, bits, num_rows, token, sums):
    """Add codes of 4 bits less 8, or of 8 bits, in vectors: a group is of so many rows of words, and `token` has four
    pairs of x, or four x, for each."""
    table, stride = TABLES[INTEGERS_4].ctypes.data, 4 * words.shape[1]
    blocks = words.shape[1] // LANES
    for group in range(len(sums)):
        for row in range(group * num_rows, (group + 1) * num_rows, WORD_ROWS):
            x, own = token[row:].ctypes.data, sums[group].ctypes.data
            if bits == 4:
                add_words_of_eight(words[row].ctypes.data, stride, x, table, blocks, own)
            else:
                add_words_of_four(words[row].ctypes.data, stride, x, table, blocks, own)


@part
def _add_in_order(words, index, x, sums):
    """The same where the groups do not follow each other: codes of a group are multiplied by pairs, a panel of outputs
    at a time, whose words stay in a core's cache."""
    starts, offsets, rotations, token = _pairs_of_groups(index, x, len(sums), 4 * words.shape[1])
    table = TABLES[INTEGERS_4].ctypes.data
    for panel in range(0, words.shape[1], PANEL):
        own = words[0, panel:].ctypes.data
        for group in range(len(sums)):
            first, num_pairs = starts[group], (starts[group + 1] - starts[group]) // 2
            places = (offsets[first:].ctypes.data, rotations[first:].ctypes.data, token[first:].ctypes.data)
            add_pairs_of_codes(own, *places, table, num_pairs, sums[group, panel:].ctypes.data)


@part
def _pairs_of_groups(index, x, num_groups, stride):
    """The inputs by group: where each group begins [G + 1], and of each input in that order where its words begin, how
    far they turn and its x. A group of an odd number ends with an input of no weight."""
    starts = np.zeros(num_groups + 1, np.int64)
    for k in range(len(index)):
        starts[index[k] + 1] += 1
    for group in range(num_groups):
        starts[group + 1] += starts[group] + starts[group + 1] % 2
    offsets, rotations = np.zeros(starts[num_groups], np.int64), np.zeros(starts[num_groups], np.int32)
    token, places = np.zeros(starts[num_groups], np.uint16), starts.copy()
    for k in range(len(index)):
        place = places[index[k]]
        places[index[k]] += 1
        offsets[place] = k // _PER_WORD * stride
        rotations[place] = (4 * (k % _PER_WORD) + 16 * (place % 2)) % 32
        token[place] = np.uint16(bits_of(x[k]) >> u32(16))
    return starts, offsets, rotations, token


@part
def _in_halves(x):
    """x as pairs of bfloat16 [I / 8, 4, 2], number i of eight beside number i + 4."""
    token = np.empty((len(x) // _PER_WORD, 4, 2), np.uint16)
    for row in range(len(token)):
        for i in range(4):
            for half in range(2):
                token[row, i, half] = np.uint16(bits_of(x[row * _PER_WORD + 4 * half + i]) >> u32(16))
    return token


@part
def _as_words(x):
    """The bits of x, four numbers a row."""
    return x.view(np.uint16).reshape(len(x) // 4, 4, 2)


@part
def _add_codes(words, bits, width, index, x, sums):
    """Add codes of any width, one input after another, to the sums of its group; a block of outputs at a time."""
    mask, last, num_outputs = u32((1 << bits) - 1), len(words) - 1, words.shape[1]
    for begin in range(0, num_outputs, _BLOCK):
        end = min(begin + _BLOCK, num_outputs)
        for k in range(len(x)):
            own = sums[index[k] if len(index) else k // width, begin:end]
            low, high = words[k * bits >> 5, begin:end], words[min((k * bits >> 5) + 1, last), begin:end]
            shift = u32(k * bits & 31)
            if shift + bits <= 32:
                for o in range(end - begin):
                    own[o] += x[k] * f32(i32(u32(u32(low[o]) >> shift) & mask))
            else:
                for o in range(end - begin):
                    code = u32(u32(low[o]) >> shift) | u32(u32(high[o]) << u32(32 - shift))
                    own[o] += x[k] * f32(i32(u32(code) & mask))


@part
def _scale_stream(fields, start, sums, sums_x, middle, y):
    """Add the sums [G, O] of codes less `middle`, times their scales, to y [O]."""
    bits, num_outputs = fields[BITS], len(y)
    zeros = carray(pointer(start + fields[ZEROS], INT32_LIKE), (len(sums), (num_outputs * bits + 31) // 32))
    scales, mask, offset = np.empty(num_outputs, np.float32), u32((1 << bits) - 1), u32(fields[ZERO_OFFSET])
    last = u32(zeros.shape[1] - 1)
    for group in range(len(sums)):
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * num_outputs, -1, 0, scales)
        for o in range(u32(num_outputs)):
            place = u32(u32(o) * u32(bits))
            word, shift = u32(place >> u32(5)), u32(place & u32(31))
            low, high = u32(zeros[group, word]), u32(zeros[group, min(u32(word + u32(1)), last)])
            code = u32(u32(low >> shift) | u32(u32(high << u32(1)) << u32(u32(31) - shift)))
            zero = f32(i32(u32(u32(code + offset) & mask)) - middle)
            y[o] += scales[o] * (sums[group, o] - zero * sums_x[group])


@part
def _add_rows(words, begin, end, token, num_words, sums):
    """Add codes less 8 of the inputs from `begin` to `end` for the first words, in vectors."""
    table, stride = TABLES[INTEGERS_4].ctypes.data, 4 * words.shape[1]
    for k in range(begin, end, OUTPUT_ROWS):
        x = token[k:].ctypes.data
        add_rows_of_outputs(words[k].ctypes.data, stride, x, table, num_words // LANES, sums.ctypes.data)


@part
def _add_outputs(words, first, x, sums):
    """The same of one row for the words from `first` on, in float32."""
    for place in range(_PER_WORD):
        own, shift = sums[place], u32(4 * place)
        for n in range(first, len(words)):
            own[n] += x * f32(i32(u32(u32(words[n]) >> shift) & u32(15)) - i32(8))


@part
def _as_bfloat16(x):
    token = np.empty(len(x), np.uint16)
    for k in range(len(x)):
        token[k] = np.uint16(bits_of(x[k]) >> u32(16))
    return token


@kernel(f"void({MATRIX})", nogil=True)
def multiply_stream(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix in a stream of words [W, O] down the inputs to y [O]."""
    bits, width, num_outputs = fields[BITS], fields[WIDTH], len(y)
    words = carray(pointer(start + fields[CODES], INT32_LIKE), (len(x) * bits // 32, num_outputs))
    index, num_groups = group_of_columns(fields, start, len(x)), fields[NUM_GROUPS]
    sums_x = np.empty(num_groups, np.float32)
    sums_of_groups(x, width, index, sums_x)
    sums = np.zeros((num_groups, num_outputs), np.float32)
    is_narrow, per_word = is_narrow and bits == 4, 32 // bits
    is_even = len(index) == 0 and num_outputs % LANES == 0 and width % (WORD_ROWS * per_word) == 0
    if is_narrow and len(index) and num_outputs % PANEL == 0:
        _add_in_order(words, index, x, sums)
    elif is_even and (is_narrow or bits == 8):
        _add_groups(words, bits, width // per_word, _in_halves(x) if is_narrow else _as_words(x), sums)
    else:
        is_narrow = False
        _add_codes(words, bits, width, index, x, sums)
    _scale_stream(fields, start, sums, sums_x, i32(8 if is_narrow else 0), y)


@kernel(f"void({MATRIX})", nogil=True)
def multiply_output_words(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of 4-bit codes to y [O]; a word of [I, O / 8] has eight outputs, number i at place
    `ORDER.index(i)`."""
    width, num_groups, num_words = fields[WIDTH], fields[NUM_GROUPS], len(y) // _PER_WORD
    words = carray(pointer(start + fields[CODES], INT32_LIKE), (len(x), num_words))
    zeros = carray(pointer(start + fields[ZEROS], INT32_LIKE), (num_groups, num_words))
    scales, sums = np.empty(len(y), np.float32), np.empty((_PER_WORD, num_words), np.float32)
    num_fast = num_words // LANES * LANES if is_narrow and width % OUTPUT_ROWS == 0 else 0
    token = _as_bfloat16(x)
    for group in range(num_groups):
        sums[:] = 0
        begin, end = group * width, (group + 1) * width
        if num_fast:
            _add_rows(words, begin, end, token, num_fast, sums)
        for k in range(begin, end if num_fast < num_words else begin):
            _add_outputs(words[k], num_fast, x[k], sums)
        zeros_x = -x[begin:end].sum()
        _add_outputs(zeros[group], 0, zeros_x, sums)
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * len(y), -1, 0, scales)
        for n in range(num_words):
            for i in range(_PER_WORD):
                y[_PER_WORD * n + i] += scales[_PER_WORD * n + i] * sums[_PLACES[i], n]

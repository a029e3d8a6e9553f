"""Matrices whose rows lie one after another, in 4 or 8 bits a number, times one token: FP8, MXFP4,
NVFP4 and compressed-tensors' integers. Importing this module imports numba.

The products of a group are summed before its scale multiplies them. Zero-points are left out of
those sums: their part is a product with the sum of the group's x.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import part, pointer
from runtime.kernels.cpu.published.published import (
    BITS,
    BYTE_NUMBERS,
    CODES,
    E4M3,
    E5M2,
    FLOATS_4,
    HEIGHT,
    INT32_LIKE,
    INTEGERS_4,
    IS_INVERSE,
    KIND,
    MATRIX,
    NUM_GROUPS,
    NUMBERS,
    SCALE_TYPE,
    SCALES,
    UINT8_LIKE,
    WHOLE,
    WIDTH,
    ZEROS,
    f32,
    i32,
    in_order,
    read_scales,
    sums_of_groups,
    u32,
)
from runtime.kernels.cpu.vectors import dot_bytes

_STEP = 32  # codes of 8 bits that `vectors` takes at a time


@part
def read_rows(fields, start, row, scales):
    """Fill `scales` with the scales of a row, and with the following ones if it is longer than a
    row of them."""
    whole = start + fields[WHOLE] if fields[WHOLE] >= 0 else -1
    first = (row if fields[HEIGHT] == 1 else row // fields[HEIGHT]) * fields[NUM_GROUPS]
    read_scales(
        start + fields[SCALES], fields[SCALE_TYPE], first, whole, fields[IS_INVERSE], scales
    )


@part
def _zeros(fields, start, row, scales, sums):
    """Return the sum that zero-points take off a row: words [O bits / 32, G] down the outputs hold
    them."""
    place = row * fields[BITS]
    bits = fields[BITS]
    words = carray(pointer(start + fields[ZEROS], INT32_LIKE), (place // 32 + 1, len(scales)))[
        place // 32
    ]
    shift = u32(place % 32)
    mask = u32((1 << bits) - 1)
    middle = i32(1 << bits - 1)
    total = f32(0)
    for group in range(len(scales)):
        zero = i32(u32(u32(words[group]) >> shift) & mask) - middle
        total += f32(zero) * scales[group] * sums[group]
    return total


@part
def _take_zeros(fields, start, x, y, index):
    """Subtract from y [O] the sums that zero-points add to it, if there are any."""
    if fields[ZEROS] < 0:
        return
    scales = np.empty(fields[NUM_GROUPS], np.float32)
    sums = np.empty_like(scales)
    sums_of_groups(x, fields[WIDTH], index, sums)
    for row in range(len(y)):
        read_rows(fields, start, row, scales)
        y[row] -= _zeros(fields, start, row, scales, sums)


@part
def _half_bytes(codes, numbers, x, width, scales):
    """Return the product of a row [I / 2] whose groups follow each other and have an even width."""
    total = f32(0)
    for group in range(len(scales)):
        own = f32(0)
        for i in range(group * width // 2, (group + 1) * width // 2):
            own += numbers[codes[i] & 15] * x[2 * i] + numbers[codes[i] >> 4] * x[2 * i + 1]
        total += scales[group] * own
    return total


@part
def _half_bytes_in_any_order(codes, numbers, x, index, scales):
    total = f32(0)
    for i in range(len(codes)):
        total += scales[index[2 * i]] * (numbers[codes[i] & 15] * x[2 * i])
        total += scales[index[2 * i + 1]] * (numbers[codes[i] >> 4] * x[2 * i + 1])
    return total


@part
def _bytes(codes, numbers, x, index, scales, first):
    """Return the product of the columns of a row from `first` on."""
    total = f32(0)
    for k in range(first, len(x)):
        total += scales[index[k]] * (numbers[codes[k]] * x[k])
    return total


@part
def _multiply_half_bytes(fields, start, x, y, index):
    width = fields[WIDTH]
    numbers = NUMBERS[fields[KIND]]
    codes = carray(pointer(start + fields[CODES], UINT8_LIKE), (len(y), len(x) // 2))
    scales = np.empty(fields[NUM_GROUPS], np.float32)
    is_even = len(index) == 0 and width % 2 == 0
    columns = _columns(index, width, 0 if is_even else len(x))
    for row in range(len(y)):
        read_rows(fields, start, row, scales)
        if is_even:
            y[row] += _half_bytes(codes[row], numbers, x, width, scales)
        else:
            y[row] += _half_bytes_in_any_order(codes[row], numbers, x, columns, scales)


@part
def _multiply_bytes(fields, start, x, y, index):
    kind = fields[KIND]
    width = fields[WIDTH]
    codes = carray(pointer(start + fields[CODES], UINT8_LIKE), (len(y), len(x)))
    scales = np.empty(fields[NUM_GROUPS], np.float32)
    numbers = BYTE_NUMBERS[kind]
    num_fast = 0 if len(index) or width % _STEP else len(x) // width
    columns = _columns(index, width, len(x))
    # twice, so that nothing gets too small
    worth = f32(2.0**60 if kind == E4M3 else 2.0**56 if kind == E5M2 else 1)
    token = x * worth
    for row in range(len(y)):
        if row % fields[HEIGHT] == 0:
            read_rows(fields, start, row, scales)
        if num_fast:
            own = (codes[row].ctypes.data, token.ctypes.data, scales.ctypes.data)
            y[row] += dot_bytes(kind, *own, num_fast, width // _STEP) * worth
        y[row] += _bytes(codes[row], numbers, x, columns, scales, num_fast * width)


@part
def _columns(index, width, count):
    """Return the group of each of `count` columns."""
    if len(index):
        return index
    columns = np.empty(count, np.int32)
    for k in range(count):
        columns[k] = k // width
    return columns


@kernel(f"void({MATRIX})", nogil=True)
def multiply(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix to y [O]. Of two 4-bit codes, the even one is in the low half of a
    byte; unsigned 8-bit integers are taken less 128."""
    token, index = in_order(fields, start, x)
    if fields[KIND] in (FLOATS_4, INTEGERS_4):
        _multiply_half_bytes(fields, start, token, y, index)
    else:
        _multiply_bytes(fields, start, token, y, index)
    _take_zeros(fields, start, token, y, index)

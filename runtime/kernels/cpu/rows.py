"""Matrices whose rows lie one after another, in 4 or 8 bits a number, times one token: FP8, MXFP4, NVFP4 and
compressed-tensors' integers. Importing this module imports numba.

The products of a group are summed before its scale multiplies them. Zero-points are left out of those sums: their part
is a product with the sum of the group's x.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import bits_of, part, pointer
from runtime.kernels.cpu.published import (
    BITS,
    CODES,
    E4M3,
    E5M2,
    HEIGHT,
    INT8,
    INT32_LIKE,
    IS_INVERSE,
    KIND,
    MATRIX,
    NUM_GROUPS,
    NUMBERS,
    SCALE_TYPE,
    SCALES,
    TABLES,
    UINT8_LIKE,
    WHOLE,
    WIDTH,
    ZEROS,
    f32,
    float8,
    group_of_columns,
    i32,
    read_scales,
    sums_of_groups,
    u32,
)
from runtime.kernels.cpu.vectors import e4m3, e5m2, half_bytes, half_bytes_by_fours, half_bytes_by_twos, int8, uint8

_STEP, _STEP_OF_BYTES = 64, 32  # codes of 4 and 8 bits that `vectors` takes at a time


@part
def _read_row(fields, start, row, scales):
    """Read the scales of a row."""
    whole = start + fields[WHOLE] if fields[WHOLE] >= 0 else -1
    first = row // fields[HEIGHT] * len(scales)
    read_scales(start + fields[SCALES], fields[SCALE_TYPE], first, whole, fields[IS_INVERSE], scales)


@part
def _zeros(fields, start, row, scales, sums):
    """What zero-points take off a row: words [O bits / 32, G] down the outputs hold them."""
    place, bits = row * fields[BITS], fields[BITS]
    words = carray(pointer(start + fields[ZEROS], INT32_LIKE), (place // 32 + 1, len(scales)))[place // 32]
    shift, mask, middle = u32(place % 32), u32((1 << bits) - 1), i32(1 << bits - 1)
    total = f32(0)
    for group in range(len(scales)):
        zero = i32(u32(u32(words[group]) >> shift) & mask) - middle
        total += f32(zero) * scales[group] * sums[group]
    return total


@part
def _dot(codes, x, scales, table, width):
    """One row in vectors; `x` is in the order of its steps."""
    if width == 16:
        return half_bytes_by_fours(codes, x, scales.ctypes.data, table, len(scales), 1)
    if width == 32:
        return half_bytes_by_twos(codes, x, scales.ctypes.data, table, len(scales), 1)
    return half_bytes(codes, x, scales.ctypes.data, table, len(scales), width // _STEP)


@part
def _in_steps(x):
    """x as bfloat16, of each step the even ones first."""
    token = np.empty((len(x) // _STEP, 2, _STEP // 2), np.uint16)
    for step in range(len(token)):
        for i in range(_STEP // 2):
            token[step, 0, i] = np.uint16(bits_of(x[step * _STEP + 2 * i]) >> u32(16))
            token[step, 1, i] = np.uint16(bits_of(x[step * _STEP + 2 * i + 1]) >> u32(16))
    return token.reshape(len(x))


@part
def _half_bytes(codes, numbers, x, width, index, parts):
    """Write the sum of each group [G] of a row [I / 2]."""
    parts[:] = 0
    if len(index) or width % 2:
        for k in range(len(x)):
            group = index[k] if len(index) else k // width
            parts[group] += numbers[codes[k // 2] >> (k % 2 * 4) & 15] * x[k]
        return
    for group in range(len(parts)):
        total = f32(0)
        for i in range(group * width // 2, (group + 1) * width // 2):
            total += numbers[codes[i] & 15] * x[2 * i] + numbers[codes[i] >> 4] * x[2 * i + 1]
        parts[group] = total


@part
def _bytes_in_vectors(kind, codes, x, scales, steps):
    """The groups of a row that have a scale in `scales`, each of so many steps."""
    num_scales, scales = len(scales), scales.ctypes.data
    if kind == E4M3:
        return e4m3(codes, x, scales, scales, num_scales, steps)
    if kind == E5M2:
        return e5m2(codes, x, scales, scales, num_scales, steps)
    if kind == INT8:
        return int8(codes, x, scales, scales, num_scales, steps)
    return uint8(codes, x, scales, scales, num_scales, steps)


@part
def _bytes(kind, codes, first, x, width, index, scales):
    """The columns of a row from `first` on."""
    total, shift = f32(0), u32(21 if kind == E5M2 else 20)
    for k in range(first, len(x)):
        scale = scales[index[k] if len(index) else k // width]
        if kind in (E4M3, E5M2):
            total += scale * (float8(u32(codes[k]), shift) * x[k])
        else:
            total += scale * (f32(i32(codes[k] ^ 0x80) - 128) if kind == INT8 else f32(i32(codes[k]) - 128)) * x[k]
    return total


@kernel(f"void({MATRIX})", nogil=True)
def multiply_half_bytes(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of 4-bit codes to y [O]; a byte has the even one of two in its low half. `is_narrow`
    says that x is in bfloat16."""
    width, table, numbers = fields[WIDTH], TABLES[fields[KIND]], NUMBERS[fields[KIND]]
    codes = carray(pointer(start + fields[CODES], UINT8_LIKE), (len(y), len(x) // 2))
    index = group_of_columns(fields, start, len(x))
    is_fast = is_narrow and len(index) == 0 and len(x) % _STEP == 0 and (width in (16, 32) or width % _STEP == 0)
    token = _in_steps(x) if is_fast else np.empty(0, np.uint16)
    scales = np.empty(fields[NUM_GROUPS], np.float32)
    sums, parts = np.empty_like(scales), np.empty_like(scales)
    sums_of_groups(x, width, index, sums)
    for row in range(len(y)):
        _read_row(fields, start, row, scales)
        if fields[ZEROS] >= 0:
            y[row] -= _zeros(fields, start, row, scales, sums)
        if is_fast:
            y[row] += _dot(codes[row].ctypes.data, token.ctypes.data, scales, table.ctypes.data, width)
            continue
        _half_bytes(codes[row], numbers, x, width, index, parts)
        for group in range(len(scales)):
            y[row] += scales[group] * parts[group]


@kernel(f"void({MATRIX})", nogil=True)
def multiply_bytes(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of 8-bit numbers to y [O]; integers without sign are less by 128."""
    kind, width = fields[KIND], fields[WIDTH]
    codes = carray(pointer(start + fields[CODES], UINT8_LIKE), (len(y), len(x)))
    index = group_of_columns(fields, start, len(x))
    scales = np.empty(fields[NUM_GROUPS], np.float32)
    sums = np.empty_like(scales)
    sums_of_groups(x, width, index, sums)
    num_fast = 0 if len(index) or width % _STEP_OF_BYTES else len(x) // width
    worth = f32(2.0**60 if kind == E4M3 else 2.0**56 if kind == E5M2 else 1)  # twice, so that nothing gets too small
    token = x * worth
    for row in range(len(y)):
        if row % fields[HEIGHT] == 0:
            _read_row(fields, start, row, scales)
        if fields[ZEROS] >= 0:
            y[row] -= _zeros(fields, start, row, scales, sums)
        total = _bytes(kind, codes[row], num_fast * width, token, width, index, scales)
        if num_fast:
            own = (codes[row].ctypes.data, token.ctypes.data, scales[:num_fast])
            total += _bytes_in_vectors(kind, *own, width // _STEP_OF_BYTES)
        y[row] += total * worth

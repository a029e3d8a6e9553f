"""Shared parts of the kernels for published formats: how a matrix is described to them, and how its
scales are read.

Importing this module imports numba.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from artifacts.common.numba_loops import kernel
from artifacts.formats.codes import E2M1, IQ4
from artifacts.formats.integers.order import INPUT_BITS
from runtime.kernels.cpu.gated import bits_of, part, pointer

# A matrix is int64 [NUM_FIELDS]. Offsets count bytes from the start of its expert; -1 stands for a
# missing tensor.
(
    KIND,
    CODES,
    SCALES,
    SCALE_TYPE,
    HEIGHT,  # rows with one scale
    WIDTH,  # columns with one scale
    NUM_GROUPS,  # of columns
    ZEROS,
    ZERO_OFFSET,  # what is added to a stored zero-point
    ORDER,  # the group and the column at each place, where columns are not in their own order
    WHOLE,  # the scale of the matrix
    IS_INVERSE,  # whether that divides
    BITS,
    BLOCK_NBYTES,
    NUM_FIELDS,
) = range(15)
FLOATS_4, INTEGERS_4, E4M3, E5M2, INT8, UINT8, STREAM = range(7)  # of KIND
# the same, of ggml's blocks
Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4, Q2_K, Q3_K, IQ4_NL, IQ4_XS = range(7, 17)
IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, Q2_0, Q5_0 = range(17, 24)
PLAIN_BFLOAT16, PLAIN_FLOAT16, PLAIN_FLOAT32 = range(24, 27)  # the same, of plain numbers
IN_BYTES = 32  # added to a KIND of blocks of 32: x is rounded to 8 bits
FLOAT32, FLOAT16, BFLOAT16, E8M0, FLOAT8 = range(5)  # of SCALE_TYPE

MATRIX = "int64[::1], int64, float32[::1], float32[::1], boolean"  # fields, start, x, y, is_narrow

f32 = np.float32
i32 = np.int32
u32 = np.uint32
UINT8_LIKE = np.zeros(1, np.uint8)
UINT16_LIKE = np.zeros(1, np.uint16)
INT16_LIKE = np.zeros(1, np.int16)
INT32_LIKE = np.zeros(1, np.int32)
INT64_LIKE = np.zeros(1, np.int64)
FLOAT_LIKE = np.zeros(1, np.float32)
# of each code of 4 bits, by KIND
NUMBERS = np.array([E2M1, [code - 8 for code in range(16)], IQ4], np.float32)
# the same as bfloat16, twice
TABLES = np.tile((NUMBERS.view(np.uint32) >> 16).astype(np.uint16), 2)
_LARGEST = f32(32767)
_LEAST = f32(1e-30)  # a worth below it has no inverse
_COLUMN = u32((1 << INPUT_BITS) - 1)
_ALL = torch.arange(256, dtype=torch.uint8)
# of each code of 8 bits, by KIND; integers without sign less 128
BYTE_NUMBERS = np.zeros((UINT8 + 1, 256), np.float32)
BYTE_NUMBERS[E4M3], BYTE_NUMBERS[E5M2] = (
    _ALL.view(own).float() for own in (torch.float8_e4m3fn, torch.float8_e5m2)
)
BYTE_NUMBERS[INT8] = _ALL.view(torch.int8).float()
BYTE_NUMBERS[UINT8] = _ALL.float() - 128


@intrinsic
def number(context, bits):
    """Return the float32 of these bits."""

    def generate(_, builder, __, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@part
def beyond_bfloat16(x):
    """Return the remainder of float16 numbers after their bits are cut to bfloat16, which holds the
    remainder exactly, too; 0 for infinity."""
    rest = np.empty_like(x)
    for k in range(len(x)):
        less = x[k] - number(u32(bits_of(x[k]) & u32(0xFFFF0000)))
        rest[k] = less if less == less else f32(0)
    return rest


@part
def in_sixteen_bits(x, token, worth):
    """Write x [I] as whole numbers of 16 bits, and for each block of them the worth of one: the
    largest over 32767. Return the rest of x. NaN and infinity make the worth NaN."""
    rest = np.empty_like(x)
    size = len(x) // max(1, len(worth))
    for block in range(len(worth)):
        largest = f32(0)
        for k in range(size * block, size * (block + 1)):
            own = abs(x[k])
            largest = own if own > largest or own != own else largest
        worth[block] = largest / _LARGEST
        inverse = _LARGEST / largest if largest > _LEAST else f32(0)
        for k in range(size * block, size * (block + 1)):
            number = np.rint(x[k] * inverse)
            token[k] = np.int16(number)
            rest[k] = x[k] - number * worth[block]
    return rest


@part
def in_turns(first, second):
    """Return the rows [n, size] of both arrays in turn: [n, 2, size]. It uses loops, because numba
    compiles an assignment to a slice for seconds."""
    both = np.empty((len(first), 2, first.shape[1]), first.dtype)
    for row in range(len(first)):
        for k in range(first.shape[1]):
            both[row, 0, k] = first[row, k]
            both[row, 1, k] = second[row, k]
    return both


@part
def float8(byte, shift):
    """Return an 8-bit float divided by a power of two, because its exponent goes where the exponent
    of float32 ends."""
    magnitude = u32(u32(byte & u32(0x7F)) << shift)
    return number(u32(magnitude | u32(u32(byte & u32(0x80)) << u32(24))))


@part
def _read_halves(halves, is_float16, out):
    if is_float16:
        for i in range(len(out)):
            half = u32(halves[i])
            bits = u32(u32(half & u32(0x7FFF)) << u32(13)) | u32(u32(half & u32(0x8000)) << u32(16))
            out[i] = number(u32(bits)) * f32(2.0**112)
    else:
        for i in range(len(out)):
            out[i] = number(u32(u32(halves[i]) << u32(16)))


@part
def _read_bytes(stored, is_exponent, out):
    if is_exponent:
        for i in range(len(out)):
            byte = u32(stored[i])
            out[i] = number(u32(byte << u32(23)) if byte else u32(1 << 22))
    else:
        for i in range(len(out)):
            out[i] = float8(u32(stored[i]), u32(20)) * f32(2.0**120)


@part
def in_order(fields, start, x):
    """Return x [I] in the order of the stored columns, and the group of each place, int32 [I],
    which is empty if groups of `WIDTH` follow each other."""
    index = np.empty(0 if fields[ORDER] < 0 else len(x), np.int32)
    if fields[ORDER] < 0:
        return x, index
    order = carray(pointer(start + fields[ORDER], INT32_LIKE), len(x))
    token = np.empty_like(x)
    for place in range(len(x)):
        token[place] = x[u32(order[place]) & _COLUMN]
        index[place] = order[place] >> i32(INPUT_BITS)
    others = i32(0)
    for group in range(fields[NUM_GROUPS]):
        for place in range(group * fields[WIDTH], min((group + 1) * fields[WIDTH], len(x))):
            others |= index[place] ^ i32(group)
    return token, index if others else index[:0]


@part
def sums_of_groups(x, width, index, out):
    """Write the sum of every group of columns. A group has the columns with its number in `index`,
    or, if that is empty, the next `width` columns; the last group may be cut off."""
    out[:] = 0
    for k in range(len(index)):
        out[index[k]] += x[k]
    if len(index) == 0:
        for group in range(len(out)):
            out[group] = x[group * width : (group + 1) * width].sum()


@kernel("void(int64, int64, int64, int64, int64, float32[::1])", nogil=True)
def read_scales(address, kind, first, whole, is_inverse, out):
    """Fill out [n] with the scales from number `first` on; `whole` is the address of a further
    factor, or -1."""
    if kind == FLOAT32:
        stored = carray(pointer(address + 4 * first, FLOAT_LIKE), out.shape)
        for i in range(len(out)):  # numba compiles `out[:] = stored` for a second longer
            out[i] = stored[i]
    elif kind in (FLOAT16, BFLOAT16):
        halves = carray(pointer(address + 2 * first, UINT16_LIKE), out.shape)
        _read_halves(halves, kind == FLOAT16, out)
    else:
        stored_bytes = carray(pointer(address + first, UINT8_LIKE), out.shape)
        _read_bytes(stored_bytes, kind == E8M0, out)
    if whole >= 0:
        factor = carray(pointer(whole, FLOAT_LIKE), 1)[0]
        if is_inverse:
            factor = f32(1) / factor
        for i in range(len(out)):
            out[i] *= factor

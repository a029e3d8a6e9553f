"""Matrices whose outputs lie side by side in a stream of words down the inputs (GPTQ), times one
token. Importing this module imports numba.

The codes of a group are multiplied and summed for all outputs at once, before scales multiply the
sums. Zero-points take part as products with the sum of the group's x.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import part, pointer
from runtime.kernels.cpu.lanes import HAS_QUADS, LANES
from runtime.kernels.cpu.published.column_vectors import (
    DIGITS,
    PANEL,
    UNIT,
    add_scaled,
    add_units,
    arrange,
)
from runtime.kernels.cpu.published.published import (
    BITS,
    CODES,
    FLOAT16,
    INT32_LIKE,
    MATRIX,
    NUM_FIELDS,
    NUM_GROUPS,
    SCALE_TYPE,
    SCALES,
    WIDTH,
    ZERO_OFFSET,
    ZEROS,
    f32,
    i32,
    in_order,
    read_scales,
    sums_of_groups,
    u32,
)

# inputs of a group, whose sums with codes of 8 bits are whole numbers of 32 bits
MAX_WIDTH = 1 << 16
_LARGEST = np.float32(127 * 256 + 127)
_LEAST = np.float32(1e-30)  # groups below it are zero: the inverse of their worth could be infinite
_ROWS = 8  # of words that one panel of outputs takes before the next does
_BLOCK = 1024  # outputs whose sums of all groups stay in a core's nearest cache


@part
def in_digits(x, num_groups, width):
    """Return x [I] as digits int8 [I / 32, 2, 32], the higher first, and for each group the worth
    of its numbers and their sum [G], float32. A group is of `width` numbers, a multiple of 32.

    Both digits make a whole number of 16 bits, which processors multiply by codes without rounding.
    The worth is the largest number of the group over 32639, so that the rounding error of a number
    is at most 1 / 65278 of the largest, compared with up to 1 / 512 of each in bfloat16. The sum of
    a group that holds NaN or infinity is NaN."""
    digits = np.empty((len(x) // UNIT, DIGITS, UNIT), np.int8)
    worth = np.empty(num_groups, np.float32)
    sums = np.empty(num_groups, np.float32)
    for group in range(num_groups):
        largest = f32(0)
        for k in range(group * width, (group + 1) * width):
            largest = max(largest, abs(x[k]))
        worth[group] = largest / _LARGEST
        inverse = _LARGEST / largest if largest > _LEAST else f32(0)
        total = f32(0)
        for unit in range(group * width // UNIT, (group + 1) * width // UNIT):
            own = x[unit * UNIT : (unit + 1) * UNIT]
            high = digits[unit, 0]
            low = digits[unit, 1]
            for i in range(UNIT):
                number = np.rint(own[i] * inverse)
                digit = np.floor((number + f32(128)) * f32(1 / 256))
                total += number
                high[i] = np.int8(i32(digit))
                low[i] = np.int8(i32(number - digit * f32(256)))
        sums[group] = total
    return digits, worth, sums


@part
def _add_panels(fields, start, x, num_fast, y):
    """Add the first `num_fast` outputs, in whole panels, for matrices whose groups are of whole
    units."""
    bits = fields[BITS]
    num_groups = fields[NUM_GROUPS]
    stride = 4 * len(y)
    digits, worth, sums_x = in_digits(x, num_groups, fields[WIDTH])
    arrange(bits, digits.ctypes.data, len(digits))
    units_of_group = len(digits) // num_groups
    row_of_zeros = (len(y) * bits + 31) // 32 * 4
    sums = np.empty(DIGITS * num_fast, np.int32)
    scales = np.empty(num_fast, np.float32)
    for group in range(num_groups):
        sums[:] = 0
        first = group * units_of_group
        end = (group + 1) * units_of_group
        while first < end:
            num_units = min(_ROWS // bits, end - first)
            own_x = digits[first].ctypes.data
            row = start + fields[CODES] + first * bits * stride
            for panel in range(0, num_fast, PANEL):
                add_units(
                    bits,
                    row + 4 * panel,
                    stride,
                    own_x,
                    num_units,
                    sums[DIGITS * panel :].ctypes.data,
                )
            first += num_units
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * len(y), -1, 0, scales)
        zeros = start + fields[ZEROS] + group * row_of_zeros
        own = (zeros, fields[ZERO_OFFSET], scales.ctypes.data, worth[group], sums_x[group])
        add_scaled(bits, *own, num_fast // LANES, sums.ctypes.data, y.ctypes.data)


@part
def _add_codes(words, bits, width, index, x, sums):
    """Add codes of any width, one input after another, to the sums of their group; one block of
    outputs at a time."""
    mask = u32((1 << bits) - 1)
    last = len(words) - 1
    num_outputs = words.shape[1]
    for begin in range(0, num_outputs, _BLOCK):
        end = min(begin + _BLOCK, num_outputs)
        for k in range(len(x)):
            own = sums[index[k] if len(index) else k // width, begin:end]
            low = words[k * bits >> 5, begin:end]
            high = words[min((k * bits >> 5) + 1, last), begin:end]
            shift = u32(k * bits & 31)
            if shift + bits <= 32:
                for o in range(end - begin):
                    own[o] += x[k] * f32(i32(u32(u32(low[o]) >> shift) & mask))
            else:
                for o in range(end - begin):
                    code = u32(u32(low[o]) >> shift) | u32(u32(high[o]) << u32(32 - shift))
                    own[o] += x[k] * f32(i32(u32(code) & mask))


@part
def _scale_stream(fields, start, first, sums, sums_x, y):
    """Add the sums [G, O] of codes, times their scales, to y [O], for the outputs from `first`
    on."""
    bits = fields[BITS]
    num_outputs = len(y)
    zeros = carray(
        pointer(start + fields[ZEROS], INT32_LIKE), (len(sums), (num_outputs * bits + 31) // 32)
    )
    scales = np.empty(num_outputs, np.float32)
    mask = u32((1 << bits) - 1)
    offset = u32(fields[ZERO_OFFSET])
    last = u32(zeros.shape[1] - 1)
    for group in range(len(sums)):
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * num_outputs, -1, 0, scales)
        for o in range(u32(first), u32(num_outputs)):
            place = u32(u32(o) * u32(bits))
            word = u32(place >> u32(5))
            shift = u32(place & u32(31))
            low = u32(zeros[group, word])
            high = u32(zeros[group, min(u32(word + u32(1)), last)])
            code = u32(u32(low >> shift) | u32(u32(high << u32(1)) << u32(u32(31) - shift)))
            zero = f32(i32(u32(u32(code + offset) & mask)))
            y[o] += scales[o] * (sums[group, o - first] - zero * sums_x[group])


@kernel(f"void({MATRIX})", nogil=True)
def multiply_stream(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix in a stream of words [W, O] down the inputs to y [O]."""
    bits = fields[BITS]
    width = fields[WIDTH]
    num_outputs = len(y)
    words = carray(pointer(start + fields[CODES], INT32_LIKE), (len(x) * bits // 32, num_outputs))
    num_groups = fields[NUM_GROUPS]
    token, index = in_order(fields, start, x)
    is_fast = is_narrow and len(index) == 0 and width % UNIT == 0 and width <= MAX_WIDTH
    num_fast = num_outputs // PANEL * PANEL if is_fast else 0
    if num_fast:
        _add_panels(fields, start, token, num_fast, y)
    if num_fast < num_outputs:
        sums = np.zeros((num_groups, num_outputs - num_fast), np.float32)
        sums_x = np.empty(num_groups, np.float32)
        sums_of_groups(token, width, index, sums_x)
        _add_codes(words[:, num_fast:], bits, width, index, token, sums)
        _scale_stream(fields, start, num_fast, sums, sums_x, y)


def is_in_digits(bits: int, *, is_narrow: bool) -> bool:
    """Return whether replicas of this width are multiplied here, in whole numbers.

    This holds at 8 bits, for which there is no table, if the processor has the products.
    `is_narrow` says that x is in bfloat16."""
    return bits == 8 and is_narrow and HAS_QUADS


@part
def can_add_replica(group_size):
    return group_size % UNIT == 0 and group_size <= MAX_WIDTH


@part
def add_replica(words, scales, zeros, bits, x, y):
    """Add x [T, I] times a replica's matrix, given by the arrays of `low_bit.multiplier`, to y [T,
    O]."""
    fields = np.full(NUM_FIELDS, -1)
    fields[BITS] = bits
    fields[CODES] = words.ctypes.data
    fields[ZEROS] = zeros.ctypes.data
    fields[SCALES] = scales.ctypes.data
    fields[SCALE_TYPE] = FLOAT16
    fields[NUM_GROUPS] = len(scales)
    fields[WIDTH] = x.shape[1] // len(scales)
    fields[ZERO_OFFSET] = 0
    for t in range(len(x)):
        multiply_stream(fields, 0, x[t], y[t], True)

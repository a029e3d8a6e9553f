"""Matrices of `rows` times one token in 16 bits, for processors with `lanes.HAS_BYTE_TABLES`.
Importing this module imports numba.

Codes become bfloat16, which holds every number of a format exactly, and products are summed in
float32 before scales multiply them. A token in float16 is the sum of two tokens in bfloat16,
without rounding. Matrices whose groups do not fit whole steps go to `rows`.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import bits_of, part, pointer
from runtime.kernels.cpu.published import rows
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
    KIND,
    MATRIX,
    NUM_GROUPS,
    TABLES,
    WIDTH,
    ZEROS,
    beyond_bfloat16,
    f32,
    i32,
    in_order,
    in_turns,
    number,
    u32,
)
from runtime.kernels.cpu.published.row_vectors import (
    BYTES_TURNED,
    HALF_BYTES_TURNED,
    ROWS,
    STEP_NBYTES,
    floats,
    half_bytes,
    half_bytes_less_zeros,
    integers,
    integers_less_zeros,
)

_LANES = 16
_PLANES = np.ascontiguousarray(
    (BYTE_NUMBERS.view(np.uint32) >> 16)
    .astype(np.uint16)
    .view(np.uint8)
    .reshape(-1, 256, 2)
    .swapaxes(1, 2)
)
"""Low bytes and high bytes of the number of each code of 8 bits, by KIND. The first 128 of each
plane are the tables of floats."""
_FLOAT_PLANES = np.ascontiguousarray(_PLANES[:, :, :128])


@part
def _is_half(kind):
    return kind in (FLOATS_4, INTEGERS_4)


@part
def _codes_of_step(kind):
    return 2 * STEP_NBYTES if _is_half(kind) else STEP_NBYTES


@part
def _groups_of_steps(fields, num_inputs, codes):
    """Return how many groups of a row are of whole steps, the steps of each, and how many scales a
    step has: 0 if all steps share one."""
    width = fields[WIDTH]
    if fields[NUM_GROUPS] == 1:
        return num_inputs // codes, 1, 0
    if width < codes:
        return num_inputs // codes, 1, codes // width
    return num_inputs // width, width // codes, 1


@part
def _is_fit(fields, num_inputs, num_outputs, codes):
    """Return whether vectors take the whole matrix."""
    width = fields[WIDTH]
    groups, steps, _ = _groups_of_steps(fields, num_inputs, codes)
    in_steps = (
        fields[NUM_GROUPS] == 1
        or width % codes == 0
        or (width % _LANES == 0 and codes % width == 0)
    )
    rest = -(-num_inputs // codes) - groups * steps
    is_ended = rest == 0 or (rest == 1 and (codes == STEP_NBYTES or num_inputs % codes > 0))
    has_four = num_outputs % ROWS == 0 and (fields[HEIGHT] == 1 or fields[HEIGHT] % ROWS == 0)
    return num_inputs % 64 == 0 and has_four and in_steps and is_ended


@part
def _in_steps(values, kind, filler):
    """Return the values in the order of `row_vectors`, [steps, inputs of a step]; the filler
    completes the last step."""
    count = _codes_of_step(kind)
    steps = np.full((-(-len(values) // count), count), filler, values.dtype)
    flat = steps.reshape(steps.size)
    for k in range(len(values)):
        flat[k] = values[k]
    turned = np.empty_like(steps)
    if _is_half(kind):
        _turn(steps, turned, *HALF_BYTES_TURNED)
    else:
        _turn(steps, turned, *BYTES_TURNED)
    return turned


@part
def _turn(steps, out, first, second, count):
    """Write [second, first, count] for each [first, second, count]."""
    for step in range(len(steps)):
        for j in range(second):
            for i in range(first):
                for k in range(count):
                    out[step, (j * first + i) * count + k] = steps[
                        step, (i * second + j) * count + k
                    ]


@part
def _token(x, kind):
    """Return x in steps as bfloat16."""
    bits = np.empty(len(x), np.uint16)
    for k in range(len(x)):
        bits[k] = np.uint16(bits_of(x[k]) >> u32(16))
    return _in_steps(bits, kind, np.uint16(0))


@part
def _token_in_two(x, kind):
    """Return x, float16, as two tokens in bfloat16: [steps, 2, inputs of a step]."""
    return in_turns(_token(x, kind), _token(beyond_bfloat16(x), kind))


@part
def _sums_of_lanes(x):
    """Return minus the sum of x of each lane of a step, [steps, 16]."""
    token = x.reshape(len(x), x.size // len(x))
    sums = np.zeros((len(x), _LANES), np.float32)
    for step in range(len(token)):
        for i in range(token.shape[1]):
            sums[step, i % (2 * _LANES) // 2] -= number(u32(u32(token[step, i]) << u32(16)))
    return sums


@part
def _read_zeros(fields, start, first, out):
    """Fill out [rows, G] with the zero-points from row `first` on."""
    bits = fields[BITS]
    num_groups = out.shape[1]
    mask = u32((1 << bits) - 1)
    middle = i32(1 << bits - 1)
    for row in range(len(out)):
        place = (first + row) * bits
        shift = u32(place & 31)
        own = start + fields[ZEROS] + 4 * (place >> 5) * num_groups
        words = carray(pointer(own, INT32_LIKE), num_groups)
        for group in range(num_groups):
            out[row, group] = f32(i32(u32(u32(words[group]) >> shift) & mask) - middle)


@part
def _multiply_in_order(fields, start, x, token, y):
    """Add x times a matrix that vectors take to y. `token` is x as `_token` or `_token_in_two`
    returns it."""
    kind = fields[KIND]
    num_groups = fields[NUM_GROUPS]
    groups, steps, per_step = _groups_of_steps(fields, len(x), _codes_of_step(kind))
    rest = len(token) - groups * steps
    stride = len(x) // (2 if _is_half(kind) else 1)
    next_scales = 4 * num_groups if fields[HEIGHT] == 1 else 0
    scales = np.zeros(ROWS * num_groups + _LANES, np.float32)
    zeros = np.zeros(ROWS * num_groups + _LANES, np.float32)
    own_zeros = zeros[: ROWS * num_groups].reshape(ROWS, num_groups)
    sums_x = _sums_of_lanes(token) if fields[ZEROS] >= 0 else np.empty((0, _LANES), np.float32)
    tables = TABLES[kind].ctypes.data if _is_half(kind) else _PLANES[kind].ctypes.data
    layout = (per_step, groups, steps, rest, zeros.ctypes.data, sums_x.ctypes.data)
    own_scales = scales[: num_groups * (ROWS if next_scales else 1)]
    weights = (scales.ctypes.data, next_scales)
    codes = start + fields[CODES]
    y_place = y.ctypes.data
    for row in range(0, len(y), ROWS):
        rows.read_rows(fields, start, row, own_scales)
        places = (codes + row * stride, stride, token)
        own = y_place + 4 * row
        if fields[ZEROS] >= 0:
            _read_zeros(fields, start, row, own_zeros)
            if _is_half(kind):
                half_bytes_less_zeros(*places, tables, *weights, *layout, own)
            else:
                integers_less_zeros(*places, tables, *weights, *layout, own)
        elif _is_half(kind):
            half_bytes(*places, tables, *weights, *layout, own)
        elif kind in (E4M3, E5M2):
            floats(*places, _FLOAT_PLANES[kind].ctypes.data, *weights, *layout, own)
        else:
            integers(*places, tables, *weights, *layout, own)


@kernel(f"void({MATRIX})", nogil=True)
def multiply(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of 4-bit codes or 8-bit numbers to y [O]."""
    own_x, index = in_order(fields, start, x)
    if len(index) == 0 and _is_fit(fields, len(x), len(y), _codes_of_step(fields[KIND])):
        _multiply_in_order(fields, start, own_x, _token(own_x, fields[KIND]), y)
    else:
        rows.multiply(fields, start, x, y, is_narrow)


@kernel(f"void({MATRIX})", nogil=True)
def multiply_float16(fields, start, x, y, is_narrow):
    """Multiply like `multiply`, with x in float16."""
    own_x, index = in_order(fields, start, x)
    if len(index) == 0 and _is_fit(fields, len(x), len(y), _codes_of_step(fields[KIND])):
        _multiply_in_order(fields, start, own_x, _token_in_two(own_x, fields[KIND]), y)
    else:
        rows.multiply(fields, start, x, y, is_narrow)

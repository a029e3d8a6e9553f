"""Products with matrices in trellis codes on a CPU, compiled by numba: the codes are read where
they lie.

A token is rotated and rounded to whole numbers of 16 bits, relative to its largest. In float32 the
rounding error becomes a second 16-bit number, worth 2^-15 of the first. Up to four vectors of
numbers share the levels of a block of rows. Importing this module imports numba.

Shapes: T tokens, I inputs, O outputs, V vectors of numbers.
"""

import numpy as np
import torch
from numba import carray

from artifacts.common.numba_loops import kernel, part
from artifacts.quantisation.trellis.trellis import (
    MULTIPLIER,
    Trellis,
    num_words,
    row_factors,
    steps,
    tables,
)
from runtime.kernels.cpu.gated import pointer
from runtime.kernels.cpu.replicas.rotation import rotate, rotate_back, rotation
from runtime.kernels.cpu.replicas.trellis_vectors import (
    AT_ONCE,
    LEVELS,
    MOST_COLUMNS,
    ROWS,
    UNIT,
    call,
    functions,
)

CODES, SCALE, HIGH, ROW_SCALES = range(4)
"""Places in a matrix's addresses, int64 [4], in the order of the format's PARTS; the address of row
scales is 0 if outputs are rotated."""

NUM_OUTPUTS, NUM_INPUTS, HALF_BITS, NUM_HIGH, FACTOR = range(5)
"""Places in a matrix's sizes, int64 [5]. The factor is the multiplier, shifted left by 16 minus the
state's bits."""

MANY_TOKENS = 64
"""From this number on it pays to unpack the levels: docs/lab/lowbit.md."""

MOST_VECTORS = 4
_PANEL = 256  # rows that are unpacked at a time: they stay in the cache
_LARGEST = np.float32(32767)
_LEAST = np.float32(1e-30)
_SECOND = np.float32(1 << 15)
_BYTE = np.zeros(1, np.uint8)
_WORD = np.zeros(1, np.int16)
_FLOAT = np.zeros(1, np.float32)
_STEPS = np.array(steps())
_ROW_FACTORS = np.array(row_factors())
_TABLES = np.array(tables())
f32 = np.float32
i32 = np.int32
i16 = np.int16


def make_ready() -> None:
    """Compile the functions that a token needs."""
    functions()
    for each in (rotate, rotate_back, _multiply):
        each.compiled()


def num_digits(dtype: torch.dtype) -> int:
    """Return how many numbers of 16 bits stand for each number of x."""
    return 2 if dtype is torch.float32 else 1


def addresses_of(trellis: Trellis) -> np.ndarray:
    """Return the addresses of the tensors of a matrix, 0 for one that is absent."""
    parts = (trellis.codes, trellis.scale, trellis.high, trellis.row_scales)
    return np.array([0 if part is None else part.data_ptr() for part in parts])


def sizes_of(trellis: Trellis) -> np.ndarray:
    """Return the sizes of a matrix, from the shapes of its tensors."""
    low = num_words(trellis.half_bits, trellis.num_outputs)
    more = num_words(trellis.half_bits + 1, trellis.num_outputs) - low
    num_high = (trellis.codes.numel() - low * trellis.num_inputs) // more if more else 0
    factor = MULTIPLIER << (16 - trellis.state_bits)
    return np.array([trellis.num_outputs, trellis.num_inputs, trellis.half_bits, num_high, factor])


def multiply(x: torch.Tensor, trellis: Trellis) -> torch.Tensor:
    """Multiply x [T, I] by the matrix: [T, O] in x's dtype. A token's sums do not depend on the
    other tokens."""
    y = np.zeros((len(x), trellis.num_outputs), np.float32)
    matrix = addresses_of(trellis), sizes_of(trellis)
    _multiply(functions(), *matrix, rotated(x, trellis.num_inputs), num_digits(x.dtype), y)
    return _turned_back(torch.from_numpy(y), trellis).to(x.dtype)


def multiply_unpacked(x: torch.Tensor, trellis: Trellis) -> torch.Tensor:
    """Multiply like `multiply`, by way of the levels, unpacked some rows at a time: for many
    tokens."""
    is_high = trellis.is_high()
    matrix = (addresses_of(trellis), sizes_of(trellis))
    num_inputs = trellis.num_inputs
    order = np.argsort(is_high, kind="stable")
    half_bits = trellis.half_bits + np.sort(is_high)
    token = rotated(x, num_inputs)[:, order] * (_STEPS[half_bits] * trellis.scale.numpy())
    numbers = torch.from_numpy(token).to(x.dtype)
    y = torch.empty(trellis.num_outputs, len(x))
    levels = torch.empty(_PANEL, num_inputs, dtype=torch.int16)
    for first in range(0, trellis.num_outputs, _PANEL):
        rows = y[first : first + _PANEL]
        _unpack(functions(), *matrix, first // ROWS, levels[: padded_size(len(rows))].numpy())
        rows.copy_(levels[: len(rows)].to(x.dtype) @ numbers.mT)  # levels are exact in 16 bits too
    y = y.mT.contiguous()
    if trellis.row_scales is not None:
        y *= torch.from_numpy(_ROW_FACTORS)[trellis.row_scales.long()]
    return _turned_back(y, trellis).to(x.dtype)


def padded_size(num_rows: int) -> int:
    """Return the number of rows in whole blocks."""
    return -(-num_rows // ROWS) * ROWS


def rotated(x: torch.Tensor, num_inputs: int) -> np.ndarray:
    """Return U x of each row of x [T, I], float32."""
    token = (x.detach() if x.requires_grad else x).float().contiguous().numpy()
    out = np.empty_like(token)
    rotate(token, *rotation(num_inputs, is_back=False), out)
    return out


def _turned_back(y: torch.Tensor, trellis: Trellis) -> torch.Tensor:
    if not trellis.is_rotated:
        return y
    out = torch.empty_like(y)
    rotate_back(y.numpy(), *rotation(trellis.num_outputs, is_back=True), out.numpy())
    return out


@part
def as_numbers(x, digits, numbers):
    """Write x [I] to `numbers` int16 [digits, I] and return the worth of the first of them, NaN if
    x is not finite."""
    largest = f32(0)
    total = f32(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
        total += abs(x[i])
    if not total < f32(np.inf):
        numbers[:] = 0
        return f32(np.nan)
    inverse = _LARGEST / largest if largest > _LEAST else f32(0)
    for i in range(len(x)):
        number = np.rint(x[i] * inverse)
        numbers[0, i] = i16(i32(number))
        if digits == 2:
            numbers[1, i] = i16(i32(np.rint((x[i] * inverse - number) * _SECOND)))
    return largest / _LARGEST


@part
def _add_columns(functions, codes, half_bits, count, factor, tokens, sums):
    """Add the columns with `half_bits` half bits, whose words begin at `codes`, times `tokens` [V,
    .] to `sums` [V, .]."""
    num_outputs = sums.shape[1]
    worth = _STEPS[half_bits]
    stride = tokens.strides[0]
    num_words = half_bits * (num_outputs // (2 * ROWS))
    table = _TABLES.ctypes.data
    at_once = min(len(tokens), AT_ONCE)
    run = functions[at_once // 2]
    own = np.empty((len(tokens), ROWS), np.float32)
    for begin in range(0, count, MOST_COLUMNS):
        size = min(MOST_COLUMNS, count - begin)
        for block in range(num_outputs // ROWS):
            first = half_bits * block // 2
            phase = half_bits * block & 1
            words = codes + 2 * (first * count + begin)
            left = num_words - first
            place = (half_bits, phase, words, 2 * count, left, num_words, size)
            for v in range(0, len(tokens), at_once):
                x = tokens[v:, begin:].ctypes.data
                out = own[v:].ctypes.data
                call(run, place + (table, factor, out, x, stride))
            for v in range(len(tokens)):
                for row in range(ROWS):
                    sums[v, block * ROWS + row] += worth * own[v, row]


@part
def padded(size, unit):
    return (size + unit - 1) // unit * unit


@part
def _add_vectors(functions, addresses, sizes, numbers, sums):
    """Add the matrix, without its scales, times `numbers` int16 [V, I] to `sums` [V, .]."""
    num_inputs = sizes[NUM_INPUTS]
    half_bits = sizes[HALF_BITS]
    num_high = sizes[NUM_HIGH]
    is_high = carray(pointer(addresses[HIGH], _BYTE), ((num_inputs + 7) // 8,))
    # Room for all columns in both: bits of a damaged file may say that there are more high ones.
    low = np.zeros((len(numbers), padded(num_inputs, UNIT) + 1), np.int16)
    high = np.zeros((len(numbers), padded(num_inputs, UNIT) + 1), np.int16)
    num_low = num_inputs - num_high
    for v in range(len(numbers)):
        i = 0
        j = 0
        for column in range(num_inputs):
            bit = (is_high[column >> 3] >> (column & 7)) & 1
            low[v, i] = numbers[v, column]
            high[v, j] = numbers[v, column]
            i = i + 1 - bit
            j = j + bit
        for place in range(num_low, low.shape[1]):
            low[v, place] = 0
        for place in range(num_high, high.shape[1]):
            high[v, place] = 0
    codes = addresses[CODES]
    if num_low:
        _add_columns(functions, codes, half_bits, num_low, sizes[FACTOR], low, sums)
    if num_high:
        codes += 2 * half_bits * (sums.shape[1] // (2 * ROWS)) * num_low
        _add_columns(functions, codes, half_bits + 1, num_high, sizes[FACTOR], high, sums)


@part
def product(functions, addresses, sizes, x, digits, y):
    """Add R x of each rotated token x [T, I] to y [T, O]."""
    first = 0
    while first < len(x):
        count = min(MOST_VECTORS // digits, len(x) - first)
        count -= count == 3
        numbers = np.empty((count * digits, x.shape[1]), np.int16)
        worth = np.empty(count, np.float32)
        for t in range(count):
            worth[t] = as_numbers(x[first + t], digits, numbers[t * digits : (t + 1) * digits])
        add_numbers(functions, addresses, sizes, numbers, worth, y[first : first + count])
        first += count


@part
def add_numbers(functions, addresses, sizes, numbers, worth, y):
    """Add R x to y [T, O] for tokens as `as_numbers` wrote them: `numbers` int16 [T digits, I] with
    the worth `worth` [T]."""
    digits = len(numbers) // len(y)
    scale = carray(pointer(addresses[SCALE], _FLOAT), (1,))[0]
    sums = np.zeros((len(numbers), padded(sizes[NUM_OUTPUTS], 2 * ROWS)), np.float32)
    _add_vectors(functions, addresses, sizes, numbers, sums)
    for t in range(len(y)):
        own = sums[t * digits]
        if digits == 2:
            own += sums[t * digits + 1] / _SECOND
        _add_scaled(addresses[ROW_SCALES], own, worth[t] * scale, y[t])


@part
def _add_scaled(row_scales, sums, scale, y):
    """Add the sums [O] times the scales of their rows to y [O]."""
    if row_scales == 0:
        for o in range(len(y)):
            y[o] += sums[o] * scale
        return
    codes = carray(pointer(row_scales, _BYTE), (len(y),))
    for o in range(len(y)):
        y[o] += sums[o] * (scale * _ROW_FACTORS[codes[o]])


@kernel(
    "void(int64[::1], int64[::1], int64[::1], float32[:, ::1], int64, float32[:, ::1])", nogil=True
)
def _multiply(functions, addresses, sizes, x, digits, y):
    product(functions, addresses, sizes, x, digits, y)


@kernel("void(int64[::1], int64[::1], int64[::1], int64, int16[:, ::1])", nogil=True)
def _unpack(functions, addresses, sizes, first_block, out):
    """Write the levels of the rows from block `first_block` on to out [., I], columns with half a
    bit more behind the others."""
    num_inputs = sizes[NUM_INPUTS]
    num_high = sizes[NUM_HIGH]
    codes = addresses[CODES]
    num_blocks = padded(sizes[NUM_OUTPUTS], 2 * ROWS) // ROWS
    count = num_inputs - num_high
    first_column = 0
    for half_bits in (sizes[HALF_BITS], sizes[HALF_BITS] + 1):
        num_words = half_bits * (num_blocks // 2)
        for index in range(len(out) // ROWS if count else 0):
            block = first_block + index
            first = half_bits * block // 2
            phase = half_bits * block & 1
            words = codes + 2 * first * count
            left = num_words - first
            place = out.ctypes.data + 2 * (index * ROWS * num_inputs + first_column)
            where = (half_bits, phase, words, 2 * count, left, num_words, count)
            more = (_TABLES.ctypes.data, sizes[FACTOR], place, 2 * num_inputs, 0)
            call(functions[LEVELS], where + more)
        codes += 2 * num_words * count
        first_column = count
        count = num_high

"""Triton functions for matrices of the published formats: some of their weights as numbers, with
the bits of the formula in torch, and the product of some rows with a vector. A kernel dequantises a
whole matrix.

An attribute of a constexpr is made a constexpr of its own before another function gets it: Triton
3.6 hands on only numbers and types as such. Importing this module imports triton.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from artifacts.formats.integers.order import INPUT_BITS
from runtime.kernels.gpu.addressing import GRIDS
from runtime.kernels.gpu.blocks import load_block
from runtime.kernels.gpu.ggml import ggml_numbers, points
from runtime.kernels.gpu.low_bit import read_codes
from runtime.model.quantised.stored_matrix import StoredMatrix

_INPUT_BITS = tl.constexpr(INPUT_BITS)
_INPUT = tl.constexpr((1 << INPUT_BITS) - 1)
_BLOCKS = {
    "rows": (8, 256),
    "columns": (64, 32),
    "blocks": (8, 256),
}  # the long side runs along what is adjacent


def block_sizes(matrix: StoredMatrix) -> dict[str, int]:
    """Return the outputs and inputs of a matrix that a program takes at a time: 16 bytes of codes
    for each thread."""
    rows, columns = _BLOCKS[matrix.codes.order]
    is_in_halves = (matrix.codes.order, matrix.codes.bits) == ("rows", 4)
    return {"block_rows": rows, "block_columns": 2 * columns if is_in_halves else columns}


def points_for(matrices: Sequence[StoredMatrix], arena: torch.Tensor) -> torch.Tensor:
    """Return the points of grids on the device of `arena`, or any tensor of bytes there if none of
    the matrices has a grid."""
    has_grid = any(matrix.codes.kind in GRIDS for matrix in matrices)
    return points(arena.device) if has_grid else arena


def dequantise(expert: torch.Tensor, matrix: StoredMatrix, out: torch.Tensor) -> None:
    """Write a matrix of `expert`, uint8, to out [out, in]."""
    blocks = block_sizes(matrix)
    grid = (
        triton.cdiv(matrix.num_outputs, blocks["block_rows"]),
        triton.cdiv(matrix.num_inputs, blocks["block_columns"]),
    )
    _dequantise[grid](expert, points_for([matrix], expert), out, matrix=matrix, **blocks)


@triton.jit
def product(
    x_ptr, expert_ptr, points_ptr, first_row, step: tl.constexpr, matrix: tl.constexpr,
    dtype: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Multiply every `step`th row of a matrix from `first_row` on, dequantised to `dtype`, by a
    vector x [in], and add the bias if there is one: float32 [block_rows]."""
    rows = first_row + step * tl.arange(0, block_rows)
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    for first in range(0, matrix.num_inputs, block_columns):
        columns = first + tl.arange(0, block_columns)
        inputs = _inputs(expert_ptr, columns, matrix)
        x = tl.load(x_ptr + inputs, mask=columns < matrix.num_inputs, other=0.0).to(tl.float32)
        weights = numbers(
            expert_ptr, points_ptr, first_row, step, first, matrix, dtype, block_rows, block_columns
        )
        sums += weights.to(dtype).to(tl.float32) * x[None, :]
    y = tl.sum(sums, axis=1)
    if matrix.bias is not None:
        start = (expert_ptr + matrix.bias).to(tl.pointer_type(dtype))
        y = y.to(dtype).to(tl.float32) + tl.load(
            start + rows, mask=rows < matrix.num_outputs, other=0.0
        ).to(tl.float32)
    return y


@triton.jit
def numbers(
    expert_ptr, points_ptr, first_row, step: tl.constexpr, first, matrix: tl.constexpr,
    dtype: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Return the weights of every `step`th row from `first_row` on and of `block_columns` places
    from `first` on, float32: zero where out of range. A matrix that is not quantised is of type
    `dtype`."""
    rows = first_row + step * tl.arange(0, block_rows)
    columns = first + tl.arange(0, block_columns)
    is_row = rows < matrix.num_outputs
    is_column = columns < matrix.num_inputs
    if matrix.codes.kind == "plain":
        start = (expert_ptr + matrix.codes.start).to(tl.pointer_type(dtype))
        places = rows[:, None] * matrix.num_inputs + columns[None, :]
        weights = load_block(start + places, is_row, is_column).to(tl.float32)
    elif matrix.codes.order == "blocks":
        weights = ggml_numbers(expert_ptr, points_ptr, rows, columns, is_row, is_column, matrix)
    else:
        if matrix.codes.order == "rows":
            codes = _codes_in_bytes(expert_ptr, rows, first, is_row, matrix, block_columns)
        else:
            codes = _codes_down(expert_ptr, rows, columns, is_row, is_column, matrix)
        groups = _groups(expert_ptr, columns, matrix)
        if matrix.codes.kind == "float":
            bits: tl.constexpr = matrix.codes.bits
            mantissa: tl.constexpr = matrix.codes.mantissa
            bias: tl.constexpr = matrix.codes.bias
            values = _floats(codes, bits, mantissa, bias)
        elif matrix.codes.kind == "signed":
            values = ((codes ^ 128) - 128).to(tl.float32)
        else:
            zeros = _zeros(expert_ptr, rows, groups, is_row[:, None] & is_column[None, :], matrix)
            values = (codes - zeros).to(tl.float32)
        scales: tl.constexpr = matrix.scales
        weights = values * _scales(expert_ptr, rows, groups, is_row, is_column, scales)
    return weights


@triton.jit
def _codes_in_bytes(
    expert_ptr, rows, first, is_row, matrix: tl.constexpr, block_columns: tl.constexpr
):
    """Return codes along the inputs, int32 [rows, block_columns]. Each byte is loaded once, so that
    a thread loads adjacent ones together."""
    per_byte: tl.constexpr = 8 // matrix.codes.bits
    num_bytes: tl.constexpr = matrix.num_inputs // per_byte
    places = first // per_byte + tl.arange(0, block_columns // per_byte)
    row = expert_ptr + matrix.codes.start + rows * num_bytes
    codes = load_block(row[:, None] + places[None, :], is_row, places < num_bytes).to(tl.int32)
    if per_byte == 2:
        codes = tl.interleave(codes & 15, codes >> 4)
    return codes


@triton.jit
def _codes_down(expert_ptr, rows, columns, is_row, is_column, matrix: tl.constexpr):
    """Return codes in a stream of words down the inputs, int32 [rows, columns]."""
    bits: tl.constexpr = matrix.codes.bits
    last: tl.constexpr = matrix.num_inputs * bits // 32 - 1
    num_outputs: tl.constexpr = matrix.num_outputs
    words = (expert_ptr + matrix.codes.start).to(tl.pointer_type(tl.int32))
    places = columns[None, :] * bits
    in_range = is_row[:, None] & is_column[None, :]
    return read_codes(
        words, places >> 5, last, num_outputs, rows[:, None], places & 31, in_range, bits
    )


@triton.jit
def _floats(codes, bits: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr):
    """Return floats of few bits as float32: moved to the places of a float32's bits, and scaled by
    the difference of the biases, which is exact for small numbers too."""
    codes = codes.to(tl.uint32)
    magnitude = codes & (2 ** (bits - 1) - 1)
    sign = codes >> (bits - 1)
    return ((magnitude << (23 - mantissa)) | (sign << 31)).to(tl.float32, bitcast=True) * 2.0 ** (
        127 - bias
    )


@triton.jit
def _groups(expert_ptr, columns, matrix: tl.constexpr):
    """Return the group of each place."""
    if matrix.order is None:
        groups = columns // matrix.scales.width
    else:
        groups = _order(expert_ptr, columns, matrix) >> _INPUT_BITS
    return groups


@triton.jit
def _inputs(expert_ptr, columns, matrix: tl.constexpr):
    """Return the input at each place."""
    inputs = columns
    if matrix.order is not None:
        inputs = _order(expert_ptr, columns, matrix) & _INPUT
    return inputs


@triton.jit
def _order(expert_ptr, columns, matrix: tl.constexpr):
    start = (expert_ptr + matrix.order).to(tl.pointer_type(tl.int32))
    return tl.load(start + columns, mask=columns < matrix.num_inputs, other=0)


@triton.jit
def _scales(expert_ptr, rows, groups, is_row, is_column, scales: tl.constexpr):
    """Return the scale of each weight, float32."""
    start = expert_ptr + scales.start
    places = (rows // scales.height)[:, None] * scales.row + groups[None, :] * scales.column
    if scales.dtype == "float32":
        stored = load_block(start.to(tl.pointer_type(tl.float32)) + places, is_row, is_column)
    elif scales.dtype == "float16":
        stored = load_block(start.to(tl.pointer_type(tl.float16)) + places, is_row, is_column).to(
            tl.float32
        )
    elif scales.dtype == "bfloat16":
        stored = load_block(start.to(tl.pointer_type(tl.bfloat16)) + places, is_row, is_column).to(
            tl.float32
        )
    elif scales.dtype == "float8_e4m3fn":
        stored = _floats(load_block(start + places, is_row, is_column), 8, 3, 7)
    else:  # a power of two: the exponent of a float32, but for the smallest
        exponent = load_block(start + places, is_row, is_column).to(tl.uint32)
        stored = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    if scales.matrix is not None:
        matrix = tl.load((expert_ptr + scales.matrix).to(tl.pointer_type(tl.float32)))
        stored = tl.div_rn(stored, matrix) if scales.is_inverse else stored * matrix
    return stored


@triton.jit
def _zeros(expert_ptr, rows, groups, in_range, matrix: tl.constexpr):
    """Return the zero-point of each weight, int32, or one for all."""
    bits: tl.constexpr = matrix.codes.bits
    if matrix.zeros is None:
        zeros = 1 << (bits - 1)
    else:
        words = (expert_ptr + matrix.zeros.start).to(tl.pointer_type(tl.int32))
        places = (rows * bits)[:, None]
        group = groups[None, :] * matrix.zeros.group
        last: tl.constexpr = matrix.zeros.num_words - 1
        word: tl.constexpr = matrix.zeros.word
        stored = read_codes(words, places >> 5, last, word, group, places & 31, in_range, bits)
        zeros = (stored + matrix.zeros.offset) & ((1 << bits) - 1)
    return zeros


@triton.jit
def _dequantise(
    expert_ptr, points_ptr, out_ptr, matrix: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    """Dequantise one block of a matrix."""
    first_row = tl.program_id(0) * block_rows
    first = tl.program_id(1) * block_columns
    rows = first_row + tl.arange(0, block_rows)
    columns = first + tl.arange(0, block_columns)
    dtype = out_ptr.dtype.element_ty
    weights = numbers(
        expert_ptr, points_ptr, first_row, 1, first, matrix, dtype, block_rows, block_columns
    )
    in_range = (rows < matrix.num_outputs)[:, None] & (columns < matrix.num_inputs)[None, :]
    inputs = _inputs(expert_ptr, columns, matrix)
    tl.store(
        out_ptr + rows[:, None] * matrix.num_inputs + inputs[None, :],
        weights.to(dtype),
        mask=in_range,
    )

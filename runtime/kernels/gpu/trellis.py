"""Triton kernels for matrices in trellis codes: one multiplies from the codes where they lie, one
unpacks the levels.

A token is rotated and its numbers brought into the order of a matrix's columns, those with half a
bit more last; then a program multiplies 32 rows. Importing this module imports triton, which is
optional.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from artifacts.quantisation.trellis.trellis import (
    BLOCK_ROWS,
    MULTIPLIER,
    Trellis,
    num_words,
    row_factors,
    steps,
    tables,
)
from runtime.kernels.gpu.addressing import Numbers, arguments
from runtime.kernels.gpu.blocks import number_of
from runtime.kernels.gpu.rotation import rotate, rotate_back

MANY_TOKENS = 8
"""From this number on it pays to unpack the levels."""

_COLUMNS = 64  # of one step


class CodedMatrix(NamedTuple):
    """Layout of one matrix behind the start of an expert, in bytes, and its sizes. Without row
    scales, outputs are rotated, and the place of the row scales is any."""

    codes: int
    scale: int
    high: int
    row_scales: int
    num_outputs: int
    num_inputs: int
    half_bits: int
    num_high: int
    factor: int
    has_row_scales: bool


def matrix_of(trellis: Trellis, offsets: dict[str, int] | None = None) -> CodedMatrix:
    """Return the sizes of a matrix and the places of its parts; by default each part is at the
    beginning of a buffer of its own."""
    low, high = (num_words(trellis.half_bits + more, trellis.num_outputs) for more in (0, 1))
    num_high = (trellis.codes.numel() - low * trellis.num_inputs) // (high - low)
    places = [(offsets or {}).get(part, 0) for part in ("codes", "scale", "high", "row_scales")]
    sizes = trellis.num_outputs, trellis.num_inputs, trellis.half_bits, num_high
    return CodedMatrix(
        *places, *sizes, MULTIPLIER << (16 - trellis.state_bits), not trellis.is_rotated
    )


def multiply(x: torch.Tensor, trellis: Trellis) -> torch.Tensor:
    """Multiply x [t, in] by the matrix: [t, out] in x's dtype, summed in float32."""
    numbers = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
    row_scales = trellis.high if trellis.is_rotated else trellis.row_scales
    buffers = trellis.codes, trellis.scale, trellis.high, row_scales
    y = product(rotate(x), numbers, numbers[:1, 0], buffers, matrix_of(trellis), num_shared=1)
    return (rotate_back(y) if trellis.is_rotated else y).to(x.dtype)


def multiply_unpacked(x: torch.Tensor, trellis: Trellis) -> torch.Tensor:
    """Multiply like `multiply`, by way of the levels, unpacked as numbers of x's dtype: for many
    tokens."""
    matrix = matrix_of(trellis)
    device = x.device
    ordered = torch.argsort(_bits(trellis), stable=True)
    half_bits = trellis.half_bits + _bits(trellis)[ordered].long()
    token = rotate(x)[:, ordered] * (_constants(device)[1][half_bits] * trellis.scale)
    levels = torch.empty(trellis.num_outputs, trellis.num_inputs, dtype=x.dtype, device=device)
    grid = (triton.cdiv(trellis.num_outputs, BLOCK_ROWS), triton.cdiv(trellis.num_inputs, _COLUMNS))
    for more, first, count in _kinds(matrix):
        if count:
            _unpack[grid](
                trellis.codes, levels, _constants(device)[0], first, count, _words_before(matrix,
                more),
                matrix.num_outputs, matrix.num_inputs, matrix.factor,
                half_bits=matrix.half_bits + more, block_rows=BLOCK_ROWS, block_columns=_COLUMNS,
            )  # fmt: skip
    y = (token.to(x.dtype) @ levels.mT).float()
    if not trellis.is_rotated:
        return (y * _constants(device)[2][trellis.row_scales.long()]).to(x.dtype)
    return rotate_back(y).to(x.dtype)


def product(
    x: torch.Tensor,
    numbers: Numbers,
    starts: torch.Tensor,
    buffers: tuple[torch.Tensor, ...],
    matrix: CodedMatrix,
    *,
    num_shared: int,
) -> torch.Tensor:
    """Return R x of pairs [P, O], float32, where numbers [T, K] are not below zero.

    Pair p takes token p // num_shared of x [., I], rotated, and the matrix behind starts[number],
    in bytes. `buffers` are those of codes, scales, bits of columns and row scales, as int16,
    float32, uint8 and uint8."""
    levels, worths, row_worths = _constants(x.device)
    _, num_pairs, own, are_packed = arguments(numbers, starts)
    ordered = torch.empty(num_pairs, matrix.num_inputs, device=x.device)
    y = torch.empty(num_pairs, matrix.num_outputs, device=x.device)
    codes, scale, high, row_scales = buffers
    if not num_pairs:
        return y
    _arrange[(num_pairs,)](
        x.contiguous(), ordered, *own, starts, high, scale, worths, num_shared, matrix.high,
        matrix.scale,
        matrix.num_inputs, matrix.num_high, matrix.half_bits,
        are_packed=are_packed, block=triton.next_power_of_2(matrix.num_inputs),
    )  # fmt: skip
    _multiply[(triton.cdiv(matrix.num_outputs, BLOCK_ROWS), num_pairs)](
        ordered, y, *own, starts, codes, row_scales, levels, row_worths, matrix.codes,
        matrix.row_scales,
        matrix.num_outputs, matrix.num_inputs, matrix.num_high, matrix.factor,
        half_bits=matrix.half_bits, has_row_scales=matrix.has_row_scales, are_packed=are_packed,
        block_rows=BLOCK_ROWS, block_columns=_COLUMNS,
    )  # fmt: skip
    return y


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the levels, the worth of a level by half bits, and the worths of rows' scales."""
    return tuple(torch.tensor(each()).to(device) for each in (tables, steps, row_factors))


def _bits(trellis: Trellis) -> torch.Tensor:
    """Return which columns have half a bit more, uint8 [in]."""
    places = torch.arange(trellis.num_inputs, device=trellis.high.device)
    return trellis.high[places // 8] >> (places % 8).to(torch.uint8) & 1


def _kinds(matrix: CodedMatrix) -> tuple[tuple[int, int, int], ...]:
    """Return, for both kinds of columns, the additional half bits, the first column, and the number
    of columns."""
    num_low = matrix.num_inputs - matrix.num_high
    return (0, 0, num_low), (1, num_low, matrix.num_high)


def _words_before(matrix: CodedMatrix, more: int) -> int:
    return (
        num_words(matrix.half_bits, matrix.num_outputs) * (matrix.num_inputs - matrix.num_high)
        if more
        else 0
    )


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _arrange(
    x_ptr, out_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, high_ptr, scale_ptr,
    worths_ptr,
    num_shared, high, scale, num_inputs, num_high, half_bits, are_packed: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Write a pair's token in the order of its matrix's columns, times the worth of the column's
    levels."""
    pair = tl.program_id(0)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        start = tl.load(starts_ptr + number)
        columns = tl.arange(0, block)
        is_column = columns < num_inputs
        octets = tl.load(high_ptr + start + high + columns // 8, mask=is_column, other=0).to(
            tl.int32
        )
        more = (octets >> (columns % 8)) & 1
        before = tl.cumsum(more, axis=0) - more
        places = tl.where(more == 1, num_inputs - num_high + before, columns - before)
        worth = tl.load(worths_ptr + half_bits + more) * tl.load(scale_ptr + (start + scale) // 4)
        x = tl.load(x_ptr + (pair // num_shared) * num_inputs + columns, mask=is_column, other=0.0)
        # Bits of a damaged file may say that there are more high ones.
        in_range = is_column & (places >= 0) & (places < num_inputs)
        tl.store(out_ptr + pair * num_inputs + places, x * worth, mask=in_range)


@triton.jit
def _levels_of(
    words_ptr,
    levels_ptr,
    rows,
    columns,
    count,
    num_words,
    factor,
    is_column,
    half_bits: tl.constexpr,
):
    """Return the levels int16 [R, C] of rows and columns, from a stream of `num_words` words a
    column."""
    bits = half_bits * rows // 2
    first = bits // 16
    shift = bits % 16
    second = tl.where(first + 1 == num_words, 0, first + 1)
    low = tl.load(
        words_ptr + first[:, None] * count + columns[None, :], mask=is_column[None, :], other=0
    )
    high = tl.load(
        words_ptr + second[:, None] * count + columns[None, :], mask=is_column[None, :], other=0
    )
    both = (low.to(tl.int32) & 0xFFFF).to(tl.uint32) | (high.to(tl.uint32) << 16)
    states = (both >> shift[:, None].to(tl.uint32)) & 0xFFFF
    hashes = ((states * factor.to(tl.uint32)) & 0xFFFF) >> 10
    return tl.load(levels_ptr + (rows % 2)[:, None] * 64 + hashes.to(tl.int32))


@triton.jit
def _sum_columns(
    x_ptr, words_ptr, levels_ptr, rows, count, num_words, factor,
    half_bits: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Return the sums [R] over `count` columns of `half_bits` half bits times x."""
    total = tl.zeros((block_rows,), tl.float32)
    for begin in range(0, count, block_columns):
        columns = begin + tl.arange(0, block_columns)
        is_column = columns < count
        levels = _levels_of(
            words_ptr, levels_ptr, rows, columns, count, num_words, factor, is_column, half_bits
        )
        x = tl.load(x_ptr + columns, mask=is_column, other=0.0)
        total += tl.sum(levels.to(tl.float32) * x[None, :], axis=1)
    return total


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _multiply(
    x_ptr, y_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, codes_ptr, row_scales_ptr,
    levels_ptr,
    row_worths_ptr, codes, row_scales, num_outputs, num_inputs, num_high, factor,
    half_bits: tl.constexpr, has_row_scales: tl.constexpr, are_packed: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows of one pair's matrix by its ordered token."""
    pair = tl.program_id(1)
    num_low = num_inputs - num_high
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        start = tl.load(starts_ptr + number)
        rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        num_blocks = tl.num_programs(0)
        words = codes_ptr + (start + codes) // 2
        x = x_ptr + pair * num_inputs
        num_words = half_bits * num_blocks
        y = _sum_columns(
            x,
            words,
            levels_ptr,
            rows,
            num_low,
            num_words,
            factor,
            half_bits,
            block_rows,
            block_columns,
        )
        words += num_words * num_low
        y += _sum_columns(
            x + num_low, words, levels_ptr, rows, num_high, num_words + num_blocks, factor,
            half_bits + 1, block_rows, block_columns,
        )  # fmt: skip
        is_row = rows < num_outputs
        if has_row_scales:
            steps = tl.load(row_scales_ptr + start + row_scales + rows, mask=is_row, other=0).to(
                tl.int32
            )
            y *= tl.load(row_worths_ptr + steps)
        tl.store(y_ptr + pair * num_outputs + rows, y, mask=is_row)


@triton.jit
def _unpack(
    words_ptr, out_ptr, levels_ptr, first, count, words_before, num_outputs, num_inputs, factor,
    half_bits: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Write the levels of one kind of columns to out [O, I], from column `first` on."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_column = columns < count
    num_words = half_bits * tl.num_programs(0)
    words = words_ptr + words_before
    levels = _levels_of(
        words, levels_ptr, rows, columns, count, num_words, factor, is_column, half_bits
    )
    places = out_ptr + rows[:, None] * num_inputs + first + columns[None, :]
    in_range = (rows < num_outputs)[:, None] & is_column[None, :]
    tl.store(places, levels.to(tl.float32).to(out_ptr.dtype.element_ty), mask=in_range)

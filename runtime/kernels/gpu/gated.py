"""Triton kernels for experts on few tokens: each kernel finds an expert in the arena of slots by its number.

The three kernels compute the activation of gate and up for every token and rank, then the down projection of it, then
the weighted sum over experts in ascending order. Products are summed in float32, and results are rounded where the
module rounds them. No time has been measured on a GPU yet; tools.gpu.bench measures it. Importing this module imports
triton, which is optional.

A pair is a token and a rank; there are T * K pairs. `numbers` gives for each pair the index into `starts` of its
expert; `starts` are in weights from the beginning of the arena. A negative number means that the pair has no expert, or
that its expert is not loaded yet.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.addressing import Numbers, Strides, arguments
from runtime.kernels.gpu.blocks import activated, expert_start, load_block, number_of, with_bias
from runtime.kernels.gpu.gates import SILU, Gate

_ROWS = 8  # outputs of one program: few, so that one token's experts are work for every multiprocessor
_COLUMNS = 256  # weights of a row at a time
_OUTPUTS, _TOKENS = 256, 8  # of one program that only adds up


def multiply(
    x: torch.Tensor,
    numbers: Numbers,
    starts: torch.Tensor,
    arena: torch.Tensor,
    *,
    strides: Strides,
    y: torch.Tensor,
    gate: Gate = SILU,
) -> None:
    """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H], numbers [T, K], arena of x's dtype. The
    outputs of segments are added to it."""
    hidden, (top_k, num_pairs, own, are_packed) = x.shape[1], arguments(numbers, starts)
    inner = torch.empty(num_pairs, strides.neurons, dtype=x.dtype, device=x.device)
    rows, columns = _block(is_along_rows=strides.row == 1)
    rows //= 1 + strides.are_paired
    _inner[(triton.cdiv(strides.neurons, rows), num_pairs)](
        x, *own, starts, arena, inner, hidden, strides.neurons, top_k, *strides.inner,
        gate=gate, are_paired=strides.are_paired, has_bias=strides.biases is not None,
        are_packed=are_packed, block_rows=rows, block_columns=columns,
    )  # fmt: skip
    rows, columns = _block(is_along_rows=strides.output == 1)
    _down[(triton.cdiv(hidden, rows), num_pairs)](
        inner, *own, starts, arena, y, hidden, strides.neurons, *strides.outer,
        has_bias=strides.has_down_bias, are_packed=are_packed, adds=strides.is_cut,
        block_rows=rows, block_columns=columns,
    )  # fmt: skip


def combine(
    y: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *, is_wide: bool = False
) -> None:
    """Write out [T, H]: y [T * K, H] times `weights` [T, K], summed by ascending `keys` [T, K]; a negative key is no
    expert. Every share and sum is rounded to out's type, or, if `is_wide`, only the whole sum."""
    num_tokens, top_k = keys.shape
    hidden, tokens = out.shape[1], min(triton.next_power_of_2(num_tokens), _TOKENS)
    _combine[(triton.cdiv(hidden, _OUTPUTS), triton.cdiv(num_tokens, tokens))](
        y, keys, weights, out, num_tokens, hidden, top_k,
        is_wide=is_wide, width=triton.next_power_of_2(top_k), block_tokens=tokens, block=_OUTPUTS,
    )  # fmt: skip


def _block(*, is_along_rows: bool) -> tuple[int, int]:
    """Rows and columns of a matrix at a time: the long side runs along the weights that are adjacent in memory."""
    return (_COLUMNS // 4, 4 * _ROWS) if is_along_rows else (_ROWS, _COLUMNS)


@triton.jit
def _product(
    x_ptr, matrix_ptr, rows, num_rows, num_columns, row, column, block_rows: tl.constexpr, block_columns: tl.constexpr
):
    """Multiply some rows of a matrix [num_rows, num_columns] by a vector: float32 [block_rows]. Rows lie `row` weights
    apart, columns `column` weights."""
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    is_row = rows < num_rows
    for first in range(0, num_columns, block_columns):
        columns = first + tl.arange(0, block_columns)
        is_column = columns < num_columns
        x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        places = rows[:, None] * row + columns[None, :] * column
        weights = load_block(matrix_ptr + places, is_row, is_column)
        sums += weights.to(tl.float32) * x[None, :]
    return tl.sum(sums, axis=1)


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _inner(
    x_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, arena_ptr, inner_ptr, hidden, neurons, top_k,
    gate_offset, up_offset, row, column, gate_bias, up_bias, bias_step,
    gate: tl.constexpr, are_paired: tl.constexpr, has_bias: tl.constexpr,
    are_packed: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Compute the activation of some neurons of one pair."""
    pair = tl.program_id(1)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        expert_ptr = arena_ptr + expert_start(starts_ptr, number)
        token_ptr = x_ptr + (pair // top_k) * hidden
        dtype: tl.constexpr = inner_ptr.dtype.element_ty
        rows, gate_ptr = tl.program_id(0) * block_rows + tl.arange(0, block_rows), expert_ptr + gate_offset
        if are_paired:
            both = tl.program_id(0) * (2 * block_rows) + tl.arange(0, 2 * block_rows)
            y = _product(token_ptr, gate_ptr, both, 2 * neurons, hidden, row, column, 2 * block_rows, block_columns)
            gates, ups = tl.split(tl.reshape(y, (block_rows, 2)))
        else:
            gates = _product(token_ptr, gate_ptr, rows, neurons, hidden, row, column, block_rows, block_columns)
            ups = gates
            if gate.has_up:
                up_ptr = expert_ptr + up_offset
                ups = _product(token_ptr, up_ptr, rows, neurons, hidden, row, column, block_rows, block_columns)
        if has_bias:
            gates = with_bias(gates, expert_ptr + gate_bias, rows * bias_step, rows < neurons, dtype)
            ups = with_bias(ups, expert_ptr + up_bias, rows * bias_step, rows < neurons, dtype)
        tl.store(inner_ptr + pair * neurons + rows, activated(gates, ups, gate, dtype), mask=rows < neurons)


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _down(
    inner_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, arena_ptr, y_ptr,
    hidden, neurons, down_offset, output, neuron, bias,
    has_bias: tl.constexpr, are_packed: tl.constexpr, adds: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one pair's expert."""
    pair = tl.program_id(1)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        expert_ptr = arena_ptr + expert_start(starts_ptr, number)
        down_ptr = expert_ptr + down_offset
        rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        acts_ptr, out_ptr = inner_ptr + pair * neurons, y_ptr + pair * hidden + rows
        y = _product(acts_ptr, down_ptr, rows, hidden, neurons, output, neuron, block_rows, block_columns)
        if has_bias:
            y = with_bias(y, expert_ptr + bias, rows, rows < hidden, inner_ptr.dtype.element_ty)
        if adds:
            y += tl.load(out_ptr, mask=rows < hidden, other=0.0)
        tl.store(out_ptr, y, mask=rows < hidden)


@triton.jit
def _places(keys, ranks):
    """Each rank's place [T, K] in its token's sum, keys ascending, then ranks; -1 for a negative key."""
    is_used = keys >= 0
    is_tied = (keys[:, None, :] == keys[:, :, None]) & (ranks[None, None, :] < ranks[None, :, None])
    is_earlier = ((keys[:, None, :] < keys[:, :, None]) | is_tied) & is_used[:, None, :]
    return tl.where(is_used, tl.sum(is_earlier.to(tl.int32), axis=2), -1)


@triton.jit
def _combine(
    y_ptr, keys_ptr, weights_ptr, out_ptr, num_tokens, hidden, top_k,
    is_wide: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sum some outputs of some tokens, one expert after another, as the module does."""
    tokens = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    is_token = tokens < num_tokens
    ranks = tl.arange(0, width)
    pairs = tokens[:, None] * top_k + ranks[None, :]
    keys = tl.load(keys_ptr + pairs, mask=is_token[:, None] & (ranks < top_k)[None, :], other=-1)
    places = _places(keys, ranks)
    columns = tl.program_id(0) * block + tl.arange(0, block)
    is_column = columns < hidden
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    sums: tl.constexpr = tl.float32 if is_wide else dtype
    total = tl.zeros((block_tokens, block), tl.float32)
    for place in range(top_k):
        number = tl.sum(tl.where(places == place, pairs + 1, 0), axis=1)  # 0: no expert is left
        has_expert, pair = number > 0, number - 1
        y_rows = y_ptr + pair.to(tl.int64) * hidden  # a long prompt has more outputs than 32 bits count
        y = load_block(y_rows[:, None] + columns[None, :], has_expert, is_column)
        weight = tl.load(weights_ptr + pair, mask=has_expert, other=0.0).to(tl.float32)
        share = (y.to(dtype).to(tl.float32) * weight[:, None]).to(sums).to(tl.float32)
        total = (total + share).to(sums).to(tl.float32)
    out_rows = out_ptr + tokens.to(tl.int64) * hidden
    tl.store(out_rows[:, None] + columns[None, :], total.to(dtype), mask=is_token[:, None] & is_column[None, :])

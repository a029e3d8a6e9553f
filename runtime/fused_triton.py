"""Few tokens' gated experts on a GPU, in three Triton kernels that find each expert by number in the arena of slots.

`inner = silu(gate) * up` of every token and rank, `down` of that, and the weighted sum in the order of experts. Sums
within a product are float32's; what the module rounds is rounded at the same places. No time has been measured on a GPU
yet: tools.gpu_bench does. Whoever imports this module imports triton, which not every installation has.

A token and a rank are a pair, T * K in all. `numbers` says of each pair which of `starts` its expert has, counted in
weights from the beginning of the arena; below zero the pair has none, or not yet.
"""

import torch
import triton
import triton.language as tl

_ROWS = 8  # outputs of one program: few, so that one token's experts are work for every multiprocessor
_COLUMNS = 256  # weights of a row at a time
_OUTPUTS = 256  # of one program that only adds up


def multiply(
    x: torch.Tensor,
    numbers: torch.Tensor,
    starts: torch.Tensor,
    arena: torch.Tensor,
    *,
    offsets: tuple[int, int],
    inner: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H], numbers [T, K], arena of x's dtype.

    `offsets`: where gate and up [2 I, H], and down [H, I], begin in an expert, in weights; `inner` [T * K, I] is room
    for what lies between.
    """
    top_k, num_pairs = numbers.shape[1], numbers.numel()
    hidden, neurons = x.shape[1], inner.shape[1]
    into, out_of = offsets
    sizes = {"block_rows": _ROWS, "block_columns": _COLUMNS}
    _inner[(triton.cdiv(neurons, _ROWS), num_pairs)](
        x, numbers, starts, arena, inner, hidden, neurons, top_k, into, **sizes
    )
    _down[(triton.cdiv(hidden, _ROWS), num_pairs)](inner, numbers, starts, arena, y, hidden, neurons, out_of, **sizes)


def combine(y: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write out [T, H], the sum of y [T * K, H] times `weights` [T, K] by rising `keys` [T, K]; below zero is none."""
    num_tokens, top_k = keys.shape
    hidden = out.shape[1]
    _combine[(triton.cdiv(hidden, _OUTPUTS), num_tokens)](
        y, keys, weights, out, hidden, top_k, width=triton.next_power_of_2(top_k), block=_OUTPUTS
    )


@triton.jit
def _product(x_ptr, matrix_ptr, rows, num_rows, num_columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Some rows of a matrix [num_rows, num_columns] times a vector: float32 [block_rows]."""
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    is_row = rows < num_rows
    for first in range(0, num_columns, block_columns):
        columns = first + tl.arange(0, block_columns)
        is_column = columns < num_columns
        x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        places = rows[:, None] * num_columns + columns[None, :]
        weights = tl.load(matrix_ptr + places, mask=is_row[:, None] & is_column[None, :], other=0.0)
        sums += weights.to(tl.float32) * x[None, :]
    return tl.sum(sums, axis=1)


@triton.jit
def _inner(
    x_ptr,
    numbers_ptr,
    starts_ptr,
    arena_ptr,
    inner_ptr,
    hidden,
    neurons,
    top_k,
    offset,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """silu(gate) * up of some neurons of one pair."""
    pair = tl.program_id(1)
    number = tl.load(numbers_ptr + pair)
    if number >= 0:
        gate_ptr = arena_ptr + tl.load(starts_ptr + number) + offset
        up_ptr = gate_ptr + neurons * hidden
        token_ptr = x_ptr + (pair // top_k) * hidden
        rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        dtype = inner_ptr.dtype.element_ty
        gate = _product(token_ptr, gate_ptr, rows, neurons, hidden, block_rows, block_columns).to(dtype).to(tl.float32)
        up = _product(token_ptr, up_ptr, rows, neurons, hidden, block_rows, block_columns).to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(inner_ptr + pair * neurons + rows, (activated * up).to(dtype), mask=rows < neurons)


@triton.jit
def _down(
    inner_ptr,
    numbers_ptr,
    starts_ptr,
    arena_ptr,
    y_ptr,
    hidden,
    neurons,
    offset,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Some outputs of one pair's expert."""
    pair = tl.program_id(1)
    number = tl.load(numbers_ptr + pair)
    if number >= 0:
        down_ptr = arena_ptr + tl.load(starts_ptr + number) + offset
        rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        y = _product(inner_ptr + pair * neurons, down_ptr, rows, hidden, neurons, block_rows, block_columns)
        tl.store(y_ptr + pair * hidden + rows, y, mask=rows < hidden)


@triton.jit
def _combine(y_ptr, keys_ptr, weights_ptr, out_ptr, hidden, top_k, width: tl.constexpr, block: tl.constexpr):
    """Some outputs of one token, added up one expert after another, as the module does."""
    first = tl.program_id(1) * top_k
    ranks = tl.arange(0, width)
    keys = tl.load(keys_ptr + first + ranks, mask=ranks < top_k, other=-1)
    is_used = keys >= 0
    is_tied = (keys[None, :] == keys[:, None]) & (ranks[None, :] < ranks[:, None])
    is_earlier = ((keys[None, :] < keys[:, None]) | is_tied) & is_used[None, :]
    places = tl.where(is_used, tl.sum(is_earlier.to(tl.int32), axis=1), -1)
    columns = tl.program_id(0) * block + tl.arange(0, block)
    is_column = columns < hidden
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((block,), tl.float32)
    for place in range(top_k):
        is_here = places == place
        is_there = tl.sum(is_here.to(tl.int32), axis=0) > 0
        pair = first + tl.sum(tl.where(is_here, ranks, 0), axis=0)
        y = tl.load(y_ptr + pair * hidden + columns, mask=is_column & is_there, other=0.0).to(dtype).to(tl.float32)
        weight = tl.load(weights_ptr + pair, mask=is_there, other=0.0).to(tl.float32)
        total = (total + (y * weight).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_ptr + tl.program_id(1) * hidden + columns, total.to(dtype), mask=is_column)

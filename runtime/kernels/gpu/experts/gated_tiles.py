"""Triton kernels for experts on many tokens: pairs are sorted by expert, and a tile of one expert's
tokens shares one read of its weights. One kernel computes gate, up and activation, one the down
projection; `combine` sums.

Products are summed in float32, and results are rounded where the module rounds them. Each output
has one writer, and the order of additions depends on the step alone: equal inputs give equal bits,
whichever experts were loaded first. tools.gpu.bench times the kernels. Importing this module
imports triton.

A pair is a token and a rank; there are T * K pairs. `order` lists them sorted by expert.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gates import SILU, Gate
from runtime.kernels.gpu.addressing import Strides
from runtime.kernels.gpu.blocks import activated, expert_start, load_block, with_bias

TILES = (
    16,
    32,
    64,
)  # tokens of a tile: the rows of a tensor core's product, and a few times as many
_OUTPUTS = 64  # of one program
_STEP_NBYTES = 128  # of a row of weights at a time


def tile_tokens(num_pairs: int, num_experts: int) -> int:
    """Return the number of tokens of a tile for a step of this size: the mean number of tokens of
    an expert, within the sizes that tensor cores multiply."""
    each = triton.next_power_of_2(max(1, num_pairs // num_experts))
    return min(max(each, TILES[0]), TILES[-1])


def multiply(
    x: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    starts: torch.Tensor,
    arena: torch.Tensor,
    *,
    top_k: int,
    block_tokens: int,
    strides: Strides,
    y: torch.Tensor,
    gate: Gate = SILU,
) -> None:
    """Write the rows of y [T * K, H] that `tiles` name; the outputs of segments are added to them.

    x [T, H]; `order` int32 [T * K]; arena of x's dtype. `tiles` int32 [n, 3]: the index into
    `starts` of the tile's expert, the first of its pairs in `order`, and the number of pairs, at
    most `block_tokens`.
    """
    num_tiles = len(tiles)
    hidden = x.shape[1]
    inner = torch.empty(num_tiles * block_tokens, strides.neurons, dtype=x.dtype, device=x.device)
    blocks = {
        "block_tokens": block_tokens,
        "block_outputs": _OUTPUTS,
        "block_inputs": _STEP_NBYTES // x.element_size(),
        "operand": _operand(x.dtype),
        "precision": "ieee"
        if x.dtype is torch.float32
        else "tf32",  # has no effect on 16-bit weights
        "num_stages": 2,  # more would not fit into the shared memory of older GPUs
    }
    _inner[(num_tiles, triton.cdiv(strides.neurons, _OUTPUTS))](
        x, order, tiles, starts, arena, inner, hidden, strides.neurons, top_k, *strides.inner,
        gate=gate, are_paired=strides.are_paired, has_bias=strides.biases is not None, **blocks,
    )  # fmt: skip
    _down[(num_tiles, triton.cdiv(hidden, _OUTPUTS))](
        inner, order, tiles, starts, arena, y, hidden, strides.neurons, *strides.outer,
        has_bias=strides.has_down_bias, adds=strides.is_cut, **blocks,
    )  # fmt: skip


def _operand(dtype: torch.dtype) -> tl.dtype:
    """Return the type that weights are multiplied in: their own, but float32 in triton's
    interpreter, which represents a bfloat16 as an integer."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[
        dtype
    ]


@triton.jit
def _tile(order_ptr, tiles_ptr, block_tokens: tl.constexpr):
    """Read this program's tile: the index of its expert, which of its rows hold a pair, and the
    pairs."""
    tile_ptr = tiles_ptr + 3 * tl.program_id(0)
    number = tl.load(tile_ptr)
    tokens = tl.arange(0, block_tokens)
    is_token = tokens < tl.load(tile_ptr + 2)
    pairs = tl.load(order_ptr + tl.load(tile_ptr + 1) + tokens, mask=is_token, other=0)
    return number, is_token, pairs


@triton.jit
def _inner_rows(inner_ptr, neurons, block_tokens: tl.constexpr):
    """Return pointers to the beginnings of the rows of this program's tile in inner [tile, token,
    I]."""
    return (
        inner_ptr
        + (tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)).to(tl.int64) * neurons
    )


@triton.jit
def _inner(
    x_ptr, order_ptr, tiles_ptr, starts_ptr, arena_ptr, inner_ptr,
    hidden, neurons, top_k, gate_offset, up_offset, row, column, gate_bias, up_bias, bias_step,
    gate: tl.constexpr, are_paired: tl.constexpr, has_bias: tl.constexpr,
    block_tokens: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
    operand: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Compute the activation of some neurons of one tile, inner [tile, token, I]. Tiles are the
    first axis of the grid, so that those of one expert find its weights in the cache."""
    number, is_token, pairs = _tile(order_ptr, tiles_ptr, block_tokens)
    expert_ptr = arena_ptr + expert_start(starts_ptr, number)
    x_rows = x_ptr + (pairs // top_k).to(tl.int64) * hidden
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    num_each: tl.constexpr = 2 if are_paired else 1  # rows of a neuron in the first product
    width: tl.constexpr = num_each * block_outputs
    rows = tl.program_id(1) * width + tl.arange(0, width)
    is_row = rows < num_each * neurons
    gates = tl.zeros((block_tokens, width), tl.float32)
    ups = tl.zeros((block_tokens, width), tl.float32)
    for first in range(0, hidden, block_inputs):
        inputs = first + tl.arange(0, block_inputs)
        is_input = inputs < hidden
        x = load_block(x_rows[:, None] + inputs[None, :], is_token, is_input).to(operand)
        places = inputs[:, None] * column + rows[None, :] * row
        weights = load_block(expert_ptr + gate_offset + places, is_input, is_row)
        gates = tl.dot(x, weights.to(operand), gates, input_precision=precision)
        if gate.has_up and not are_paired:
            weights = load_block(expert_ptr + up_offset + places, is_input, is_row)
            ups = tl.dot(x, weights.to(operand), ups, input_precision=precision)
    if are_paired:
        gates, ups = tl.split(tl.reshape(gates, (block_tokens, block_outputs, 2)))
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    is_output = outputs < neurons
    if has_bias:
        gates = with_bias(gates, expert_ptr + gate_bias, outputs * bias_step, is_output, dtype)
        ups = with_bias(ups, expert_ptr + up_bias, outputs * bias_step, is_output, dtype)
    acts = activated(gates, ups, gate, dtype)
    acts_ptr = _inner_rows(inner_ptr, neurons, block_tokens)[:, None] + outputs[None, :]
    tl.store(acts_ptr, acts, mask=is_token[:, None] & is_output[None, :])


@triton.jit
def _down(
    inner_ptr, order_ptr, tiles_ptr, starts_ptr, arena_ptr, y_ptr,
    hidden, neurons, down_offset, output, neuron, bias, has_bias: tl.constexpr, adds: tl.constexpr,
    block_tokens: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
    operand: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one tile, each pair's in its own row."""
    number, is_token, pairs = _tile(order_ptr, tiles_ptr, block_tokens)
    expert_ptr = arena_ptr + expert_start(starts_ptr, number)
    down_ptr = expert_ptr + down_offset
    inner_rows = _inner_rows(inner_ptr, neurons, block_tokens)
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    is_output = outputs < hidden
    y = tl.zeros((block_tokens, block_outputs), tl.float32)
    for first in range(0, neurons, block_inputs):
        inputs = first + tl.arange(0, block_inputs)
        is_input = inputs < neurons
        acts = load_block(inner_rows[:, None] + inputs[None, :], is_token, is_input)
        places = outputs[None, :] * output + inputs[:, None] * neuron
        weights = load_block(down_ptr + places, is_input, is_output)
        y = tl.dot(acts.to(operand), weights.to(operand), y, input_precision=precision)
    out_ptr = y_ptr + pairs.to(tl.int64)[:, None] * hidden + outputs[None, :]
    if has_bias:
        y = with_bias(y, expert_ptr + bias, outputs, is_output, inner_ptr.dtype.element_ty)
    if adds:
        y += load_block(out_ptr, is_token, is_output).to(tl.float32)
    tl.store(out_ptr, y.to(y_ptr.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])

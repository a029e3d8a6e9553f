"""Many tokens' gated experts on a GPU: tokens sorted by expert, so that a tile of an expert's tokens shares one reading
of its weights. Two Triton kernels, gate, up and activation, then down; `fused_triton.combine` adds up.

Sums within a product are float32's; what the module rounds is rounded at the same places. Each output has one writer,
and how a product is added up depends on the step alone: equal inputs give equal bits, whatever came when. No time has
been measured on a GPU yet: tools.gpu.bench does. Whoever imports this module imports triton.

Pairs of a token and a rank are numbered T * K; `order` has them sorted by expert.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.addressing import Strides
from runtime.kernels.gpu.gated import gated

TILES = (16, 32, 64)  # tokens of a tile: the rows of a tensor core's product, and a few times as many
_OUTPUTS = 64  # of one program
_STEP_NBYTES = 128  # of a row of weights at a time


def tile_tokens(num_pairs: int, num_experts: int) -> int:
    """How many tokens a tile of such a step has: those of an expert, if all had as many, and no fewer than a tensor
    core multiplies."""
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
) -> None:
    """Write the rows of y [T * K, H] that `tiles` name; the outputs of segments are added to them.

    x [T, H]; `order` int32 [T * K]; arena of x's dtype. `tiles` int32 [n, 3]: which of `starts` an expert has, where
    the pairs of the tile begin in `order`, and how many there are, `block_tokens` at most.
    """
    num_tiles, hidden = len(tiles), x.shape[1]
    inner = torch.empty(num_tiles * block_tokens, strides.neurons, dtype=x.dtype, device=x.device)
    sizes = {
        "block_tokens": block_tokens,
        "block_outputs": _OUTPUTS,
        "block_inputs": _STEP_NBYTES // x.element_size(),
        "operand": _operand(x.dtype),
        "precision": "ieee" if x.dtype is torch.float32 else "tf32",  # of no weight on 16 bits
        "num_stages": 2,  # more would not fit into the shared memory of older GPUs
    }
    _inner[(num_tiles, triton.cdiv(strides.neurons, _OUTPUTS))](
        x,
        order,
        tiles,
        starts,
        arena,
        inner,
        hidden,
        strides.neurons,
        top_k,
        strides.gate,
        strides.up,
        strides.row,
        **sizes,
    )
    _down[(num_tiles, triton.cdiv(hidden, _OUTPUTS))](
        inner,
        order,
        tiles,
        starts,
        arena,
        y,
        hidden,
        strides.neurons,
        strides.down,
        strides.output,
        strides.neuron,
        adds=strides.is_cut,
        **sizes,
    )


def _operand(dtype: torch.dtype) -> tl.dtype:
    """What is multiplied: weights as they are, but for triton's interpreter, to which a bfloat16 is a whole number."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@triton.jit
def _inner(
    x_ptr,
    order_ptr,
    tiles_ptr,
    starts_ptr,
    arena_ptr,
    inner_ptr,
    hidden,
    neurons,
    top_k,
    gate_offset,
    up_offset,
    row,
    block_tokens: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
):
    """silu(gate) * up of some neurons of one tile, inner [tile, token, I]. Tiles come first in the grid, so that those
    of one expert find its weights in the cache."""
    tile = tl.program_id(0)
    expert_ptr = arena_ptr + tl.load(starts_ptr + tl.load(tiles_ptr + 3 * tile))
    tokens = tl.arange(0, block_tokens)
    is_token = tokens < tl.load(tiles_ptr + 3 * tile + 2)
    pairs = tl.load(order_ptr + tl.load(tiles_ptr + 3 * tile + 1) + tokens, mask=is_token, other=0)
    x_rows = x_ptr + (pairs // top_k).to(tl.int64) * hidden
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    is_output = outputs < neurons
    gate = tl.zeros((block_tokens, block_outputs), tl.float32)
    up = tl.zeros((block_tokens, block_outputs), tl.float32)
    for first in range(0, hidden, block_inputs):
        inputs = first + tl.arange(0, block_inputs)
        is_input = inputs < hidden
        x = tl.load(x_rows[:, None] + inputs[None, :], mask=is_token[:, None] & is_input[None, :], other=0.0)
        places = inputs[:, None] + outputs[None, :] * row
        in_range = is_input[:, None] & is_output[None, :]
        gates = tl.load(expert_ptr + gate_offset + places, mask=in_range, other=0.0)
        ups = tl.load(expert_ptr + up_offset + places, mask=in_range, other=0.0)
        gate = tl.dot(x.to(operand), gates.to(operand), gate, input_precision=precision)
        up = tl.dot(x.to(operand), ups.to(operand), up, input_precision=precision)
    places = (tile * block_tokens + tokens).to(tl.int64)[:, None] * neurons + outputs[None, :]
    acts = gated(gate, up, inner_ptr.dtype.element_ty)
    tl.store(inner_ptr + places, acts, mask=is_token[:, None] & is_output[None, :])


@triton.jit
def _down(
    inner_ptr,
    order_ptr,
    tiles_ptr,
    starts_ptr,
    arena_ptr,
    y_ptr,
    hidden,
    neurons,
    down_offset,
    output,
    neuron,
    adds: tl.constexpr,
    block_tokens: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
):
    """Some outputs of one tile, each pair's in its own row."""
    tile = tl.program_id(0)
    down_ptr = arena_ptr + tl.load(starts_ptr + tl.load(tiles_ptr + 3 * tile)) + down_offset
    tokens = tl.arange(0, block_tokens)
    is_token = tokens < tl.load(tiles_ptr + 3 * tile + 2)
    pairs = tl.load(order_ptr + tl.load(tiles_ptr + 3 * tile + 1) + tokens, mask=is_token, other=0)
    inner_rows = inner_ptr + (tile * block_tokens + tokens).to(tl.int64) * neurons
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    is_output = outputs < hidden
    y = tl.zeros((block_tokens, block_outputs), tl.float32)
    for first in range(0, neurons, block_inputs):
        inputs = first + tl.arange(0, block_inputs)
        is_input = inputs < neurons
        acts = tl.load(inner_rows[:, None] + inputs[None, :], mask=is_token[:, None] & is_input[None, :], other=0.0)
        places = outputs[None, :] * output + inputs[:, None] * neuron
        weights = tl.load(down_ptr + places, mask=is_input[:, None] & is_output[None, :], other=0.0)
        y = tl.dot(acts.to(operand), weights.to(operand), y, input_precision=precision)
    own_ptr = y_ptr + pairs.to(tl.int64)[:, None] * hidden + outputs[None, :]
    is_own = is_token[:, None] & is_output[None, :]
    if adds:
        y += tl.load(own_ptr, mask=is_own, other=0.0).to(tl.float32)
    tl.store(own_ptr, y.to(y_ptr.dtype.element_ty), mask=is_own)

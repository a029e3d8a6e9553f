"""One token's experts packed to 1 to 4 bits, on a GPU: gate, up and activation in one Triton kernel, down in another,
wherever in a buffer they lie. `gated.combine` adds up.

Streams are multiplied as `runtime.kernels.gpu.low_bit` does it. Not run on a GPU yet. Importing this
module imports triton.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.addressing import Matrix
from runtime.kernels.gpu.gated import gated
from runtime.kernels.gpu.low_bit import product

_OUTPUTS = 32  # of one program: few, so that one token's experts are work for every multiprocessor
_INPUTS = 64  # of one step


def multiply(
    x: torch.Tensor,
    numbers: torch.Tensor,
    starts: torch.Tensor,
    buffer: torch.Tensor,
    *,
    bits: int,
    gate_up: Matrix,
    down: Matrix,
    y: torch.Tensor,
) -> None:
    """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H], numbers [T, K] of `starts`, counted in
    words from the beginning of `buffer`, uint8; below zero is none."""
    top_k, num_pairs = numbers.shape[1], numbers.numel()
    words, scales = buffer.view(torch.int32), buffer.view(torch.float16)
    inner = torch.empty(num_pairs, down.num_inputs, dtype=x.dtype, device=x.device)
    blocks = {"bits": bits, "block_outputs": _OUTPUTS, "block_inputs": _INPUTS}
    _inner[(triton.cdiv(down.num_inputs, _OUTPUTS), num_pairs)](
        x, numbers, starts, words, scales, inner, top_k, *gate_up.sizes, **blocks
    )
    _down[(triton.cdiv(down.num_outputs, _OUTPUTS), num_pairs)](
        inner, numbers, starts, words, scales, y, *down.sizes, **blocks
    )


@triton.jit
def _inner(
    x_ptr,
    numbers_ptr,
    starts_ptr,
    words_ptr,
    scales_ptr,
    inner_ptr,
    top_k,
    words,
    zeros,
    scales,
    num_inputs,
    num_outputs,
    num_groups,
    group_size,
    last_word,
    zero_words,
    bits: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
):
    """silu(gate) * up of some neurons of one pair."""
    pair, neurons = tl.program_id(1), num_outputs // 2
    number = tl.load(numbers_ptr + pair)
    if number >= 0:
        start = tl.load(starts_ptr + number)
        token_ptr, codes_ptr = x_ptr + (pair // top_k) * num_inputs, words_ptr + start + words
        zeros_ptr, own_scales_ptr = words_ptr + start + zeros, scales_ptr + 2 * start + scales
        outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        gate = product(
            token_ptr, codes_ptr, zeros_ptr, own_scales_ptr, 1, outputs, 0, num_groups, num_inputs, num_outputs,
            last_word, zero_words, group_size, bits, 1, block_outputs, block_inputs, "ieee",
        )  # fmt: skip
        up = product(
            token_ptr, codes_ptr, zeros_ptr, own_scales_ptr, 1, outputs + neurons, 0, num_groups, num_inputs,
            num_outputs, last_word, zero_words, group_size, bits, 1, block_outputs, block_inputs, "ieee",
        )  # fmt: skip
        acts = gated(gate, up, inner_ptr.dtype.element_ty)
        places = inner_ptr + pair * neurons + outputs[None, :]
        tl.store(places, acts, mask=(outputs < neurons)[None, :])


@triton.jit
def _down(
    inner_ptr,
    numbers_ptr,
    starts_ptr,
    words_ptr,
    scales_ptr,
    y_ptr,
    words,
    zeros,
    scales,
    num_inputs,
    num_outputs,
    num_groups,
    group_size,
    last_word,
    zero_words,
    bits: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
):
    """Some outputs of one pair's expert."""
    pair = tl.program_id(1)
    number = tl.load(numbers_ptr + pair)
    if number >= 0:
        start = tl.load(starts_ptr + number)
        outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        y = product(
            inner_ptr + pair * num_inputs, words_ptr + start + words, words_ptr + start + zeros,
            scales_ptr + 2 * start + scales, 1, outputs, 0, num_groups, num_inputs, num_outputs, last_word, zero_words,
            group_size, bits, 1, block_outputs, block_inputs, "ieee",
        )  # fmt: skip
        tl.store(y_ptr + pair * num_outputs + outputs[None, :], y, mask=(outputs < num_outputs)[None, :])

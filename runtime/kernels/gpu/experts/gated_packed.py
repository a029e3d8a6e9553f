"""Triton kernels for gated experts on one token, on replicas of 1 to 8 bits anywhere in a buffer:
one kernel computes gate, up and activation, one the down projection; `weighted_sum.combine` sums.

The low-bit streams are multiplied as in `runtime.kernels.gpu.low_bit`. Importing this module
imports triton.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gates import SILU
from runtime.kernels.gpu.addressing import Matrix, Numbers, arguments
from runtime.kernels.gpu.blocks import activated, expert_start, number_of
from runtime.kernels.gpu.low_bit import product

_OUTPUTS = 32  # of one program: few, so that one token's experts are work for every multiprocessor
_INPUTS = 64  # of one step


def multiply(
    x: torch.Tensor,
    numbers: Numbers,
    starts: torch.Tensor,
    buffer: torch.Tensor,
    *,
    bits: int,
    gate_up: Matrix,
    down: Matrix,
    y: torch.Tensor,
) -> None:
    """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H].

    `numbers` [T, K] are indices into `starts`, which are in words from the beginning of `buffer`,
    uint8; a negative number is no expert."""
    top_k, num_pairs, own, are_packed = arguments(numbers, starts)
    words = buffer.view(torch.int32)
    scales = buffer.view(torch.float16)
    inner = torch.empty(num_pairs, down.num_inputs, dtype=x.dtype, device=x.device)
    blocks = {
        "bits": bits,
        "are_packed": are_packed,
        "block_outputs": _OUTPUTS,
        "block_inputs": _INPUTS,
    }
    _inner[(triton.cdiv(down.num_inputs, _OUTPUTS), num_pairs)](
        x, *own, starts, words, scales, inner, top_k, *gate_up, own=SILU, **blocks
    )
    _down[(triton.cdiv(down.num_outputs, _OUTPUTS), num_pairs)](
        inner, *own, starts, words, scales, y, *down, **blocks
    )


@triton.jit
def _streams(words_ptr, scales_ptr, number, starts_ptr, words, zeros, scales):
    """Return pointers to the words, zero-points and scales of one matrix of an expert."""
    # replicas that stay beside the slots begin on borders of 16 bytes
    start = expert_start(starts_ptr, number, 4)
    return words_ptr + start + words, words_ptr + start + zeros, scales_ptr + 2 * start + scales


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _inner(
    x_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, words_ptr, scales_ptr, inner_ptr,
    top_k,
    words, zeros, scales, num_inputs, num_outputs, num_groups, group_size, last_word, zero_words,
    own: tl.constexpr, bits: tl.constexpr, are_packed: tl.constexpr,
    block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up for some neurons of one pair."""
    pair = tl.program_id(1)
    neurons = num_outputs // 2
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        streams = _streams(words_ptr, scales_ptr, number, starts_ptr, words, zeros, scales)
        sizes = (num_inputs, num_outputs, group_size, last_word, zero_words)
        x = x_ptr + (pair // top_k) * num_inputs
        rows = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        gate = product(
            x, 1, rows, 0, num_groups, streams, sizes, bits, 1, block_outputs, block_inputs, "ieee"
        )
        up = product(
            x,
            1,
            rows + neurons,
            0,
            num_groups,
            streams,
            sizes,
            bits,
            1,
            block_outputs,
            block_inputs,
            "ieee",
        )
        acts = activated(gate, up, own, inner_ptr.dtype.element_ty)
        places = inner_ptr + pair * neurons + rows[None, :]
        tl.store(places, acts, mask=(rows < neurons)[None, :])


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _down(
    inner_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, words_ptr, scales_ptr, y_ptr,
    words, zeros, scales, num_inputs, num_outputs, num_groups, group_size, last_word, zero_words,
    bits: tl.constexpr, are_packed: tl.constexpr, block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one pair's expert."""
    pair = tl.program_id(1)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        streams = _streams(words_ptr, scales_ptr, number, starts_ptr, words, zeros, scales)
        sizes = (num_inputs, num_outputs, group_size, last_word, zero_words)
        acts = inner_ptr + pair * num_inputs
        rows = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
        y = product(
            acts,
            1,
            rows,
            0,
            num_groups,
            streams,
            sizes,
            bits,
            1,
            block_outputs,
            block_inputs,
            "ieee",
        )
        tl.store(y_ptr + pair * num_outputs + rows[None, :], y, mask=(rows < num_outputs)[None, :])

"""Triton kernels for gated experts on few tokens, on matrices of the published formats where they
lie. One kernel computes gate, up and activation, one the down projection, which may end with the
weighted sum (`runtime.kernels.gpu.experts.weighted_sum`).

Weights are rounded to the type of x, as the dequantised model has them. This module imports triton.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.addressing import GatedMatrices, Numbers, arguments
from runtime.kernels.gpu.blocks import activated, expert_start, number_of
from runtime.kernels.gpu.experts.weighted_sum import operands, sum_last
from runtime.kernels.gpu.published import block_sizes, points_for, product
from runtime.kernels.gpu.total import Total


def multiply(
    x: torch.Tensor,
    numbers: Numbers,
    starts: torch.Tensor,
    arena: torch.Tensor,
    *,
    matrices: GatedMatrices,
    y: torch.Tensor,
    total: Total | None = None,
) -> None:
    """Write y [T * K, H] for the pairs that have an expert: x [T, H].

    `numbers` [T, K] are indices into `starts`, in bytes from the beginning of `arena`, uint8; a
    negative number is no expert. With `total` the outputs of one token, of this call and of earlier
    ones, are then added up."""
    top_k, num_pairs, own, are_packed = arguments(numbers, starts)
    down = matrices.down
    neurons = matrices.down.num_inputs
    inner = torch.empty(num_pairs, neurons, dtype=x.dtype, device=x.device)
    blocks = block_sizes(matrices.gate)
    _inner[(triton.cdiv(neurons, blocks["block_rows"]), num_pairs)](
        x,
        *own,
        starts,
        arena,
        points_for([matrices.gate, matrices.up], arena),
        inner,
        top_k,
        matrices=matrices,
        are_packed=are_packed,
        **blocks,
    )
    blocks = block_sizes(down)
    pointers, constants = operands(total)
    _down[(triton.cdiv(down.num_outputs, blocks["block_rows"]), num_pairs)](
        inner,
        *own,
        starts,
        arena,
        points_for([down], arena),
        y,
        *pointers,
        top_k,
        matrix=down,
        are_packed=are_packed,
        **blocks,
        **constants,
    )


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _inner(
    x_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, arena_ptr, points_ptr, inner_ptr,
    top_k, matrices: tl.constexpr, are_packed: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    """Compute the activation of gate and up for some neurons of one pair."""
    pair = tl.program_id(1)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        neurons: tl.constexpr = matrices.down.num_inputs
        dtype: tl.constexpr = inner_ptr.dtype.element_ty
        expert_ptr = arena_ptr + expert_start(starts_ptr, number)
        token_ptr = x_ptr + (pair // top_k) * matrices.gate.num_inputs
        places = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        step: tl.constexpr = matrices.step
        of_gate: tl.constexpr = matrices.gate
        of_up: tl.constexpr = matrices.up
        activation: tl.constexpr = matrices.activation
        gate = tl.program_id(0) * block_rows * step
        up = tl.program_id(0) * block_rows * step + matrices.up_first
        gates = product(
            token_ptr, expert_ptr, points_ptr, gate, step, of_gate, dtype, block_rows, block_columns
        )
        ups = product(
            token_ptr, expert_ptr, points_ptr, up, step, of_up, dtype, block_rows, block_columns
        )
        acts = activated(gates, ups, activation, dtype)
        tl.store(inner_ptr + pair * neurons + places, acts, mask=places < neurons)


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _down(
    inner_ptr, numbers_ptr, first, second, third, fourth, starts_ptr, arena_ptr, points_ptr, y_ptr,
    keys_ptr, weights_ptr, out_ptr, done_ptr, top_k,
    matrix: tl.constexpr, are_packed: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    sums: tl.constexpr, is_wide: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one pair's expert."""
    pair = tl.program_id(1)
    num_outputs: tl.constexpr = matrix.num_outputs
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        expert_ptr = arena_ptr + expert_start(starts_ptr, number)
        acts_ptr = inner_ptr + pair * matrix.num_inputs
        first_row = tl.program_id(0) * block_rows
        dtype: tl.constexpr = inner_ptr.dtype.element_ty
        y = product(
            acts_ptr, expert_ptr, points_ptr, first_row, 1, matrix, dtype, block_rows, block_columns
        )
        rows = first_row + tl.arange(0, block_rows)
        places = y_ptr + pair * num_outputs + rows
        tl.store(places, y.to(y_ptr.dtype.element_ty), mask=rows < num_outputs)
    if sums:
        sum_last(
            y_ptr,
            keys_ptr,
            weights_ptr,
            out_ptr,
            done_ptr,
            num_outputs,
            top_k,
            is_wide,
            width,
            block_rows,
        )

"""Gated experts on a few tokens, on replicas in trellis codes anywhere in a buffer: tokens are
rotated once for all of their experts. Importing this module imports triton.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from runtime.kernels.gpu.addressing import Numbers, arguments
from runtime.kernels.gpu.blocks import number_of
from runtime.kernels.gpu.rotation import rotate, rotate_back
from runtime.kernels.gpu.trellis import CodedMatrix, product

_OUTPUTS = 1024  # of one program


def multiply(
    x: torch.Tensor,
    numbers: Numbers,
    starts: torch.Tensor,
    buffer: torch.Tensor,
    *,
    gate_up: CodedMatrix,
    down: CodedMatrix,
    y: torch.Tensor,
) -> None:
    """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H].

    `numbers` [T, K] are indices into `starts`, in bytes from the beginning of `buffer`, uint8; a
    negative number is no expert. `down` has rotated outputs, `gate_up` has not."""
    buffers = buffer.view(torch.int16), buffer.view(torch.float32), buffer, buffer
    top_k, num_pairs, own, are_packed = arguments(numbers, starts)
    inner = product(rotate(x), numbers, starts, buffers, gate_up, num_shared=top_k).to(x.dtype)
    gate, up = inner.chunk(2, dim=1)
    outputs = rotate_back(
        product(rotate(F.silu(gate) * up), numbers, starts, buffers, down, num_shared=1)
    )
    hidden = outputs.shape[1]
    _keep[(triton.cdiv(hidden, _OUTPUTS), num_pairs)](
        outputs, *own, y, hidden, are_packed=are_packed, block=_OUTPUTS
    )


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _keep(
    outputs_ptr, numbers_ptr, first, second, third, fourth, y_ptr, hidden,
    are_packed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Copy some outputs of one pair to y if it has an expert."""
    pair = tl.program_id(1)
    if number_of(pair, numbers_ptr, first, second, third, fourth, are_packed) >= 0:
        columns = tl.program_id(0) * block + tl.arange(0, block)
        outputs = tl.load(outputs_ptr + pair * hidden + columns, mask=columns < hidden, other=0.0)
        tl.store(y_ptr + pair * hidden + columns, outputs, mask=columns < hidden)

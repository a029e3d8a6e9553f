"""Gated experts on a few tokens, on replicas in trellis codes anywhere in a buffer: tokens are rotated once for all of
their experts. Importing this module imports triton.
"""

import torch

from runtime.kernels.gpu.rotation import rotate, rotate_back
from runtime.kernels.gpu.trellis import CodedMatrix, product


def multiply(
    x: torch.Tensor,
    numbers: torch.Tensor,
    starts: torch.Tensor,
    buffer: torch.Tensor,
    *,
    gate_up: CodedMatrix,
    down: CodedMatrix,
    y: torch.Tensor,
) -> None:
    """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H]; numbers [T, K] are indices into `starts`,
    in bytes from the beginning of `buffer`, uint8; a negative number is no expert."""
    buffers = buffer.view(torch.int16), buffer.view(torch.float32), buffer, buffer
    flat, top_k = numbers.reshape(-1), numbers.shape[1]
    inner = product(rotate(x), flat, starts, buffers, gate_up, num_shared=top_k).to(x.dtype)
    gate, up = inner.chunk(2, dim=1)
    acts = torch.nn.functional.silu(gate) * up
    outputs = rotate_back(product(rotate(acts), flat, starts, buffers, down, num_shared=1))
    torch.where((flat >= 0)[:, None], outputs, y, out=y)

"""Numbers into ggml's blocks by rounding to the nearest code (`quantize_row_q8_0_ref` and
`quantize_row_q4_0_ref` of ggml-quants.c): the same bytes as llama.cpp's own files have."""

import torch

from artifacts.formats.gguf.ggml import GgmlBlocks

_PANEL = 1 << 20  # weights that are encoded at a time; each needs some 20 bytes meanwhile


def encode(matrix: torch.Tensor, form: GgmlBlocks) -> torch.Tensor:
    """The blocks uint8 [out, in / 32 * nbytes] of a matrix [out, in] of finite numbers, Q8_0 or
    Q4_0, on its device.

    Scales beyond float16's range become infinite, which `form.is_sound` tells.
    """
    num_outputs, num_inputs = matrix.shape
    row_nbytes = num_inputs // form.num_weights * form.nbytes
    out = torch.empty(num_outputs, row_nbytes, dtype=torch.uint8, device=matrix.device)
    height = max(1, _PANEL // num_inputs)
    for first in range(0, num_outputs, height):
        rows = matrix[first : first + height].float()
        out[first : first + height] = _ENCODED[form.name](
            rows.unflatten(1, (-1, form.num_weights))
        ).flatten(1)
    return out


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    products = blocks * _inverse(scales)
    # Halves are rounded away from zero, as C does and torch does not.
    codes = (products.abs() + 0.5).floor_().copysign_(products).to(torch.int8)
    return torch.cat((scales.half().view(torch.uint8), codes.view(torch.uint8)), -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = largest / -8
    codes = (blocks * _inverse(scales) + 8.5).clamp_(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return torch.cat((scales.half().view(torch.uint8), low | high << 4), -1)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """Return one over the scales; 0 for the scale of a block of zeros."""
    return torch.where(scales == 0, 0, 1 / scales)


_ENCODED = {"Q8_0": _q8_0, "Q4_0": _q4_0}

"""Products with packed weights of 1 to 4 bits: one function for every width, device and number of tokens.

Few tokens are multiplied by the stream as it lies; for more, one matrix at a time is unpacked and multiplied as usual.
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

from artifacts.quantisation.packing import Packed

# From so many on it is faster to unpack a matrix once than to read its stream for each of them: see docs/lowbit.md.
MANY_TOKENS = 12
_PANEL = 1 << 18  # weights that are unpacked at a time by `dequantise`, which needs several int32 for each


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x [t, in] times the packed matrix, both on one device -> [t, out] in x's dtype. No gradient comes back."""
    kernels = _kernels(x.device)
    if kernels is None:
        return F.linear(x, dequantise(packed, x.dtype))
    if len(x) < MANY_TOKENS:
        return kernels.multiply(x, packed)
    return F.linear(x, kernels.dequantise(packed, x.dtype))


def project_packed(
    module: nn.Module, weights: dict[str, Packed | torch.Tensor], name: str, x: torch.Tensor
) -> torch.Tensor:
    """One projection of a replica, x [t, in] -> [t, out]: for `expert_forward` in place of `project`.

    A Packed is [out, in] whichever way the module itself lays its weights.
    """
    y = linear(x, weights[name])
    return y + weights[f"{name}_bias"] if module.has_bias else y


def dequantise(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [out, in], outputs side by side in memory; on any device, and what every kernel is tested against."""
    groups = torch.arange(packed.num_inputs, device=packed.qweight.device) // packed.group_size
    out = torch.empty(packed.num_inputs, packed.num_outputs, dtype=dtype, device=packed.qweight.device)
    zeros = 0.5
    if packed.qzeros is not None:
        zeros = _codes(packed.qzeros.mT, packed.bits, 0, packed.num_outputs).mT  # [G, out]
    num_rows = max(1, _PANEL // packed.num_outputs)
    for first in range(0, packed.num_inputs, num_rows):
        own = groups[first : first + num_rows]
        codes = _codes(packed.qweight, packed.bits, first, len(own)).float()
        codes -= zeros if packed.qzeros is None else zeros[own]
        out[first : first + num_rows] = codes.mul_(packed.scales[own])
    return out.mT


def make_ready(widths: Iterable[int], device: torch.device) -> None:
    """Have the kernels of these widths compiled, which takes seconds the first time, before a token waits for them."""
    if device.type == "cpu":
        for bits in widths:
            _kernels(device).multiplier(bits)


def kernel_name(device: torch.device) -> str:
    """What computes on replicas there, for a receipt."""
    if _kernels(device) is None:
        return "torch, dequantised (no triton)"
    return f"{'numba' if device.type == 'cpu' else 'triton'}, unpacked from {MANY_TOKENS} tokens on"


def _codes(words: torch.Tensor, bits: int, first: int, count: int) -> torch.Tensor:
    """`count` codes from the one at `first` on, int32 [count, m], of each stream in `words` [w, m]."""
    starts = torch.arange(first, first + count, device=words.device) * bits
    index, shift = starts // 32, (starts % 32).int()[:, None]
    num_low = (32 - shift).clamp(max=bits)  # of a code's bits lie in its first word
    low = (words[index] >> shift) & ((1 << num_low) - 1)
    following = words[(index + 1).clamp(max=len(words) - 1)]
    return low | ((following << num_low) & ((1 << bits) - 1) & -(1 << num_low))


def _kernels(device: torch.device) -> ModuleType | None:
    """What multiplies and unpacks on such a device, imported when it is first needed."""
    if device.type == "cpu":
        return _module("runtime.kernels.cpu.low_bit")
    return _module("runtime.kernels.gpu.low_bit") if device.type == "cuda" and _has_triton() else None


_module = cache(import_module)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None

"""Products with low-bit weights (1 to 8 bits): one function for every width, device and number of
tokens.

Few tokens are multiplied directly from the packed stream; for more, the matrix is dequantised
first.
"""

from collections.abc import Iterable
from types import ModuleType

import torch
from torch.nn import functional as F

from artifacts.quantisation.packing import Packed
from runtime.kernels.load import compiler, kernels

# From this number on, dequantising a matrix once beats reading its stream for each token: see
# docs/lab/lowbit.md.
MANY_TOKENS = 12
_KERNELS = {"numba": "cpu.replicas.low_bit", "triton": "gpu.low_bit"}  # by compiler
_PANEL = 1 << 18  # weights that `dequantise` unpacks at a time; each needs several int32


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Multiply x [t, in] by the low-bit matrix on the same device: [t, out] in x's dtype, without
    gradients."""
    compiled = _kernels(x.device)
    if compiled is None:
        return F.linear(x, dequantise(packed, x.dtype))
    if len(x) < MANY_TOKENS:
        return compiled.multiply(x, packed)
    return F.linear(x, compiled.dequantise(packed, x.dtype))


def dequantise(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the matrix [out, in] with its outputs adjacent in memory, on any device: the oracle of
    every kernel."""
    groups = torch.arange(packed.num_inputs, device=packed.qweight.device) // packed.group_size
    out = torch.empty(
        packed.num_inputs, packed.num_outputs, dtype=dtype, device=packed.qweight.device
    )
    zeros = 0.5
    if packed.qzeros is not None:
        zeros = _codes(packed.qzeros.mT, packed.bits, 0, packed.num_outputs).mT  # [G, out]
    num_rows = max(1, _PANEL // packed.num_outputs)
    for first in range(0, packed.num_inputs, num_rows):
        rows = groups[first : first + num_rows]
        codes = _codes(packed.qweight, packed.bits, first, len(rows)).float()
        codes -= zeros if packed.qzeros is None else zeros[rows]
        out[first : first + num_rows] = codes.mul_(packed.scales[rows])
    return out.mT


def make_ready(widths: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of these widths, for x of this dtype, before the first token needs them;
    the first compilation takes seconds."""
    if compiler(device) == "numba":
        for bits in widths:
            _kernels(device).multiplier(bits, is_narrow=dtype is torch.bfloat16).compiled()


def kernel_name(device: torch.device) -> str:
    """Return the name of the kernels that compute on replicas on this device, for the receipt."""
    if _kernels(device) is None:
        return "torch, dequantised (no triton)"
    return f"{compiler(device)}, unpacked from {MANY_TOKENS} tokens on"


def _codes(words: torch.Tensor, bits: int, first: int, count: int) -> torch.Tensor:
    """Read `count` codes, beginning with code `first`, of each stream in `words` [w, m]: int32
    [count, m]."""
    starts = torch.arange(first, first + count, device=words.device) * bits
    index = starts // 32
    shift = (starts % 32).int()[:, None]
    num_low = (32 - shift).clamp(max=bits)  # bits of each code in its first word
    low = (words[index] >> shift) & ((1 << num_low) - 1)
    following = words[(index + 1).clamp(max=len(words) - 1)]
    return low | ((following << num_low) & ((1 << bits) - 1) & -(1 << num_low))


def _kernels(device: torch.device) -> ModuleType | None:
    """Return the compiled kernels for this device, or None where torch must compute."""
    name = _KERNELS.get(compiler(device))
    return kernels(name) if name else None

"""Products with matrices in trellis codes: one function for every rate, device and number of
tokens.

Few tokens are multiplied from the codes where they lie; for more, the levels of a matrix are
unpacked first.
"""

from types import ModuleType

import torch
from torch.nn import functional as F

from artifacts.quantisation.trellis.trellis import Trellis
from runtime.kernels.load import compiler, kernels

_KERNELS = {"numba": "cpu.replicas.trellis", "triton": "gpu.trellis"}  # by compiler


def linear(x: torch.Tensor, trellis: Trellis) -> torch.Tensor:
    """Multiply x [t, in] by the matrix on the same device: [t, out] in x's dtype, without
    gradients."""
    compiled = _kernels(x.device)
    if compiled is None:
        return F.linear(x, trellis.dequantised().to(x.dtype))
    return (
        compiled.multiply(x, trellis)
        if len(x) < compiled.MANY_TOKENS
        else compiled.multiply_unpacked(x, trellis)
    )


def kernel_name(device: torch.device) -> str:
    """Return the name of the kernels that compute on trellis codes on this device, for the
    receipt."""
    compiled = _kernels(device)
    if compiled is None:
        return "torch, dequantised (no triton)"
    return f"{compiler(device)}, unpacked from {compiled.MANY_TOKENS} tokens on"


def _kernels(device: torch.device) -> ModuleType | None:
    """Return the compiled kernels for this device, or None where torch must compute."""
    name = _KERNELS.get(compiler(device))
    return kernels(name) if name else None

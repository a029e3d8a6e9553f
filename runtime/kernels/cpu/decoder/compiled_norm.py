"""RMS norms in compiled code, for one token or a few."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.kernels.decoder.norms import Compiled, Norm
from runtime.kernels.load import AS_NUMPY, is_cpu_operand, kernels


def norm_kernel(norm: Norm) -> Callable[[int, int, np.ndarray], None]:
    """Return the compiled norm, a function of the address of x [H], the address of its output and
    an array of their type. It reads the norm's weight, which must outlive it."""
    arguments = (norm.weight.data_ptr(), len(norm.weight), norm.eps, norm.is_rounded)
    return partial(kernels("cpu.decoder.norms").normalise, *arguments)


def norm_operand(norm: Norm | None) -> tuple[int, int, float, bool]:
    """Return a norm as an operand of larger kernels: the numbers that it spans (0: there is no
    norm), the address of its weights, epsilon, and whether it rounds first."""
    return (
        (0, 0, 0.0, False)
        if norm is None
        else (len(norm.weight), norm.weight.data_ptr(), norm.eps, norm.is_rounded)
    )


def like_of(dtype: torch.dtype) -> np.ndarray:
    """Return an empty array of the type that kernels know for numbers of this dtype."""
    return torch.empty(0, dtype=dtype).view(AS_NUMPY[dtype]).numpy()


def _normalise(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    run = norm_kernel(norm)
    out = torch.empty_like(rows)
    like = like_of(rows.dtype)
    for x, own in zip(rows, out, strict=True):
        run(x.data_ptr(), own.data_ptr(), like)
    return out


NUMBA = Compiled(is_cpu_operand, _normalise)
"""The CPU's compiled code for probes."""


class CompiledNorm:
    """RMS norm in compiled code for a few tokens of `dtype`."""

    def __init__(self, module: nn.Module, norm: Norm, dtype: torch.dtype) -> None:
        self._theirs = partial(type(module).forward, module)
        self._dtype = dtype
        # the kernel reads the norm's weight by its address
        self._norm = norm
        self._count = len(norm.weight)
        self._run = norm_kernel(norm)
        self._like = like_of(dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Replace the module's forward, x [.., H] -> [.., H]; torch computes more than
        `MOST_TOKENS` tokens, and heads."""
        x = hidden_states
        num_tokens = x.numel() // self._count
        if (
            x.shape[-1] != self._count
            or not 0 < num_tokens <= MOST_TOKENS
            or num_tokens > 1
            and x.dim() > 3
            or x.dtype is not self._dtype
            or x.requires_grad
            or not x.is_contiguous()
        ):
            return self._theirs(x)
        out = torch.empty(x.shape, dtype=self._dtype)
        nbytes = self._count * x.itemsize
        for behind in range(0, num_tokens * nbytes, nbytes):
            self._run(x.data_ptr() + behind, out.data_ptr() + behind, self._like)
        return out

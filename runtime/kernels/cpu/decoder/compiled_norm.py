"""RMS norms in compiled code, for one token. A probe finds which modules are RMS norms, and how
they round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import product

import numpy as np
import torch
from torch import nn

from runtime.kernels.load import AS_NUMPY, is_cpu_operand, kernels

BOUNDS = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Largest distance of compiled code from a module on a probe, by dtype, relative to the largest
number that the module gives."""

_SIZES = (1e-3, 1.0, 64.0)  # of a probe's numbers: a small one shows epsilon, a large one limits
_NUM_ROWS = 4


@dataclass(frozen=True, slots=True)
class Norm:
    """Arithmetic of an RMS norm. `weight` [H] is float32; `is_rounded`: the numbers that it
    multiplies are rounded to the dtype."""

    weight: torch.Tensor
    eps: float
    is_rounded: bool

    def kernel(self) -> Callable[[int, int, np.ndarray], None]:
        """Return the compiled norm, a function of the address of x [H], the address of its output
        and an array of their type. It reads `weight`, which must outlive it."""
        arguments = (self.weight.data_ptr(), len(self.weight), self.eps, self.is_rounded)
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


def recognise_norm(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """Return the variant of RMS norm nearest to this module for tokens of `dtype` on random
    numbers, or None if none is within `BOUNDS`."""
    if not _may_be_norm(module) or not is_cpu_operand(module.weight, dtype):
        return None
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_ROWS * len(_SIZES), len(module.weight), generator=random)
    rows = (rows * torch.tensor(_SIZES).repeat(_NUM_ROWS)[:, None]).to(dtype)
    with torch.inference_mode():
        theirs = module(rows)
        if theirs.dtype != dtype or theirs.shape != rows.shape:
            return None
        deviations = {variant: _deviation(variant, rows, theirs) for variant in _variants(module)}
    nearest = min(deviations, key=deviations.get)
    return nearest if deviations[nearest] <= BOUNDS[dtype] else None


def _may_be_norm(module: nn.Module) -> bool:
    """Return whether the module is one vector and an epsilon, and takes a token and nothing
    else."""
    state = dict(module.named_parameters())
    arguments = signature(module.forward).parameters
    is_vector = state.keys() == {"weight"} and module.weight.dim() == 1
    return is_vector and len(arguments) == 1 and isinstance(_eps(module), float)


def _eps(module: nn.Module) -> object:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _variants(module: nn.Module) -> Iterator[Norm]:
    """Yield the variants of model families: the weight, or the weight plus one, times the rounded
    or the exact number."""
    for offset, is_rounded in product((0.0, 1.0), (True, False)):
        yield Norm(module.weight.detach().float() + offset, _eps(module), is_rounded)


def _deviation(norm: Norm, rows: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the mean deviation of rows, so that the nearest of two roundings is found; infinite if
    a row is out of bounds."""
    run = norm.kernel()
    ours = torch.empty_like(rows)
    like = like_of(rows.dtype)
    for x, out in zip(rows, ours, strict=True):
        run(x.data_ptr(), out.data_ptr(), like)
    by_row = (ours.float() - theirs.float()).abs() / theirs.float().abs().amax(1, keepdim=True)
    return by_row.mean().item() if by_row.max() <= BOUNDS[rows.dtype] else float("inf")


class CompiledNorm:
    """RMS norm in compiled code for one token of `dtype`."""

    def __init__(self, module: nn.Module, norm: Norm, dtype: torch.dtype) -> None:
        self._theirs = partial(type(module).forward, module)
        self._dtype = dtype
        # the kernel reads the norm's weight by its address
        self._norm = norm
        self._count = len(norm.weight)
        self._run = norm.kernel()
        self._like = like_of(dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Replace the module's forward, x [.., H] -> [.., H]; torch computes more than one
        token."""
        x = hidden_states
        if (
            x.numel() != self._count
            or x.dtype is not self._dtype
            or x.requires_grad
            or not x.is_contiguous()
        ):
            return self._theirs(x)
        out = torch.empty(x.shape, dtype=self._dtype)
        self._run(x.data_ptr(), out.data_ptr(), self._like)
        return out

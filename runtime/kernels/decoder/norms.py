"""RMS norms. A probe finds which modules are RMS norms, and how they round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

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


class Compiled(NamedTuple):
    """Compiled code of a device, as probes need it. `takes(tensor, dtype)` says whether it computes
    with a tensor where it lies, as numbers of a dtype, by default the tensor's own. `normalise`
    computes a norm of rows [T, H]."""

    takes: Callable[..., bool]
    normalise: Callable[[Norm, torch.Tensor], torch.Tensor]


def recognise_norm(module: nn.Module, dtype: torch.dtype, compiled: Compiled) -> Norm | None:
    """Return the variant of RMS norm nearest to this module for tokens of `dtype` on random
    numbers, or None if none is within `BOUNDS`."""
    if not _may_be_norm(module) or not compiled.takes(module.weight, dtype):
        return None
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_ROWS * len(_SIZES), len(module.weight), generator=random)
    rows = rows * torch.tensor(_SIZES).repeat(_NUM_ROWS)[:, None]
    rows = rows.to(module.weight.device, dtype)
    with torch.no_grad():  # weights are kept, and read outside of inference too
        theirs = module(rows)
        if theirs.dtype != dtype or theirs.shape != rows.shape:
            return None
        deviations = {
            variant: _deviation(compiled.normalise(variant, rows), theirs)
            for variant in _variants(module)
        }
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


def _deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the mean deviation of rows, so that the nearest of two roundings is found; infinite if
    a row is out of bounds."""
    by_row = (ours.float() - theirs.float()).abs() / theirs.float().abs().amax(1, keepdim=True)
    return by_row.mean().item() if by_row.max() <= BOUNDS[theirs.dtype] else float("inf")

"""Imports of compiled kernels when they are first needed, and the dtypes that the CPU's kernels
take."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from packaging.version import Version

from artifacts.errors import Incompatible
from runtime.devices import is_host

AS_NUMPY = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}
"""The dtypes of the CPU's kernels, as numpy's."""
OLDEST_TRITON = "3.6"
"""The oldest Triton that compiles all of the GPU's kernels; `tools.gpu.oldest_triton` tries them
with it."""


@cache
def has_numba() -> bool:
    """Return whether numba can be imported: one that does not fit the machine's numpy is found, and
    then fails."""
    try:
        import numba  # noqa: F401
    except Exception:
        return False
    return True


@cache
def has_triton() -> bool:
    """Return whether triton is installed. Raises Incompatible for one that is too old for the GPU's
    kernels."""
    if find_spec("triton") is None:
        return False
    installed = import_module("triton").__version__
    if Version(installed) < Version(OLDEST_TRITON):
        raise Incompatible(
            f"triton {installed} is older than {OLDEST_TRITON}, which the kernels for GPUs need: "
            "pip install --upgrade torch brings a newer one"
        )
    return True


def compiler(device: torch.device) -> str | None:
    """Return the compiler of the kernels that run on a device, `numba` or `triton`; None where
    torch must compute."""
    if is_host(device):
        return "numba"
    return "triton" if has_triton() else None


def is_cpu_operand(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether the CPU's kernels compute with this tensor, as numbers of `dtype` (the
    tensor's own if not given), where it lies."""
    return is_host(tensor.device) and (dtype or tensor.dtype) in AS_NUMPY


@cache
def kernels(name: str) -> ModuleType:
    """Return the module `runtime.kernels.NAME`. Importing numba takes half a second; triton is not
    always installed, and chooses when it is imported whether to interpret."""
    return import_module(f"runtime.kernels.{name}")

"""Imports of compiled kernels when they are first needed, and the dtypes that the CPU's kernels
take."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from packaging.version import Version

from artifacts.errors import Incompatible

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


@cache
def kernels(name: str) -> ModuleType:
    """Return the module `runtime.kernels.NAME`. Importing numba takes half a second; triton is not
    always installed, and chooses when it is imported whether to interpret."""
    return import_module(f"runtime.kernels.{name}")

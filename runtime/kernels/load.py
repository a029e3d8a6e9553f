"""Compiled kernels, imported when they are first needed, and the dtypes that those for a CPU take."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

AS_NUMPY = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}
"""The dtypes of the CPU's kernels, as numpy's."""


@cache
def has_numba() -> bool:
    """Whether numba can be imported: one that does not fit the machine's numpy is found, and then fails."""
    try:
        import numba  # noqa: F401
    except Exception:
        return False
    return True


@cache
def kernels(name: str) -> ModuleType:
    """Return the module `runtime.kernels.NAME`. Importing numba takes half a second; triton is not always installed,
    and chooses when it is imported whether to interpret."""
    return import_module(f"runtime.kernels.{name}")

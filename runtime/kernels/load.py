"""Compiled kernels, imported when they are first needed, and the dtypes that those for a CPU take."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

AS_NUMPY = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}
"""The dtypes of the CPU's kernels, as numpy's."""


@cache
def kernels(name: str) -> ModuleType:
    """Return the module `runtime.kernels.NAME`. Importing numba takes half a second; triton is not always installed,
    and chooses when it is imported whether to interpret."""
    return import_module(f"runtime.kernels.{name}")

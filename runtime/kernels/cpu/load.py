"""Compiled kernels imported when they are first needed."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

AS_NUMPY = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}  # what has kernels, and as what they see it
GATE_UP, DOWN = "gate_up_proj", "down_proj"
module = cache(import_module)


def fused_kernels() -> ModuleType:
    """Compiled, or loaded, when they are first needed: numba alone takes half a second to import."""
    return module("runtime.kernels.cpu.gated")

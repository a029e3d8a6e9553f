"""Modules whose forward compiled code replaces."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn


class Replacement(Protocol):
    """Compiled code of one module."""

    forward: Callable[..., object]


class Forwards:
    """Replacement of `forward` in modules, from `install` to `uninstall`."""

    def __init__(self, replaced: Mapping[nn.Module, Replacement]) -> None:
        self._forwards = {module: each.forward for module, each in replaced.items()}

    def install(self) -> None:
        for module, forward in self._forwards.items():
            module.forward = forward

    def uninstall(self) -> None:
        for module in self._forwards:
            module.__dict__.pop("forward", None)

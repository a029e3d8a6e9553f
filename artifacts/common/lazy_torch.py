"""torch, imported when something of it is first asked for: what a config says of a format is read
without it, from the file that has the format's formula.

A module that takes `torch` from here defers its annotations: `from __future__ import annotations`.
"""

from importlib import import_module


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        """Return what the module has by this name, and keep it, so that it is asked for once."""
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


torch = _LazyModule("torch")

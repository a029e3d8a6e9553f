"""What happens in a forward pass, live or simulated. The names below are the library's (docs/api.md); each is imported
when it is asked for, so that whoever wants policies alone waits for no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.answers import Answer, Effort, Stream
    from runtime.generate import Sampling, Token
    from runtime.recorder import Recorder
    from runtime.session import Session
    from runtime.settings import Settings
    from runtime.sweep import Outcome, Setting, Workload

__all__ = [
    "Answer",
    "Effort",
    "Outcome",
    "Recorder",
    "Sampling",
    "Session",
    "Setting",
    "Settings",
    "Stream",
    "Token",
    "Workload",
]

_HOMES = {
    "answers": ("Answer", "Effort", "Stream"),
    "generate": ("Sampling", "Token"),
    "recorder": ("Recorder",),
    "session": ("Session",),
    "settings": ("Settings",),
    "sweep": ("Outcome", "Setting", "Workload"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"runtime.{home}"), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

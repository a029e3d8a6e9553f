"""The user interface: parse a command, call one function, render its result.

And what a program needs, by one import (docs/api.md); `import moectl` alone imports no torch:

    from moectl import Sampling, load

    with load("unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M", budget="8GB") as session:
        print(session.tokens("Why is the sky blue?", Sampling(max_new_tokens=64)).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from artifacts.errors import BadInput, BadUsage, Incompatible, OutOfResources, Problem
    from moectl.shared.defaults import default_store
    from moectl.shared.opening import load
    from moectl.shared.trace_source import simulate
    from runtime.policies import register_policy
    from runtime.replay.settings import Outcome, Setting
    from runtime.session.generation.sampling import Sampling
    from runtime.session.generation.stream import Answer
    from runtime.session.session import Session
    from runtime.session.settings import Settings

_HOMES = {
    "artifacts.errors": ("BadInput", "BadUsage", "Incompatible", "OutOfResources", "Problem"),
    "moectl.shared.defaults": ("default_store",),
    "moectl.shared.opening": ("load",),
    "moectl.shared.trace_source": ("simulate",),
    "runtime": ("Answer", "Outcome", "Sampling", "Session", "Setting", "Settings"),
    "runtime.policies": ("register_policy",),
}
__all__ = [
    "Answer",
    "BadInput",
    "BadUsage",
    "Incompatible",
    "OutOfResources",
    "Outcome",
    "Problem",
    "Sampling",
    "Session",
    "Setting",
    "Settings",
    "default_store",
    "load",
    "register_policy",
    "simulate",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'moectl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

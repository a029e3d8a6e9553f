"""Package for forward passes, live or simulated. The names below are the library's (docs/api.md).
Each is imported when it is first used, so that an import of policies or settings does not import
torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.control.recorder import Recorder
    from runtime.replay.settings import Outcome, Setting
    from runtime.replay.workload import Workload
    from runtime.session.generation.grammar.grammars import Grammar
    from runtime.session.generation.sampling import Sampling
    from runtime.session.generation.stream import Answer, Effort, Stream, Token
    from runtime.session.prompts.chat_prompt import ChatPrompt
    from runtime.session.replies.reply import Reply
    from runtime.session.session import Session
    from runtime.session.settings import Settings

__all__ = [
    "Answer",
    "ChatPrompt",
    "Effort",
    "Grammar",
    "Outcome",
    "Recorder",
    "Reply",
    "Sampling",
    "Session",
    "Setting",
    "Settings",
    "Stream",
    "Token",
    "Workload",
]

_HOMES = {
    "session.generation.stream": ("Answer", "Effort", "Stream", "Token"),
    "session.generation.grammar.grammars": ("Grammar",),
    "session.generation.sampling": ("Sampling",),
    "control.recorder": ("Recorder",),
    "session.prompts.chat_prompt": ("ChatPrompt",),
    "session.replies.reply": ("Reply",),
    "session.session": ("Session",),
    "session.settings": ("Settings",),
    "replay.settings": ("Outcome", "Setting"),
    "replay.workload": ("Workload",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"runtime.{home}"), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

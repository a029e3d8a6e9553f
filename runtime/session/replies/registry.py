"""The kinds of replies: how families of models mark what they think and the tools that they call.

A kind is a generator in a file of `kinds/`, registered by `reply_kind`. Other packages add theirs
by an entry point of the group `moectl.replies`, which leads to such a generator.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

from artifacts.common.outside import installed, load
from artifacts.errors import BadUsage
from runtime.session.replies.source import ReplyText, Steps

REASONING = "reasoning"
CALLS = "calls"
WHOLE = "whole"
_GROUP = "moectl.replies"
_FILES = (
    "thinking harmony hermes qwen_xml glm deepseek dsml kimi mistral minimax minimax_m3 gemma "
    "llama lfm cohere"
)
_KINDS: dict[str, "ReplyKind"] = {}


def new_id() -> str:
    """Return an id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Context:
    """What a parser may know: the end of the prompt, with which a reply may have begun, the schemas
    of the tools' parameters by name, the markers of calls that also end reasoning, and what makes
    the ids of calls."""

    prompt_end: str = ""
    tools: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_id


Parse = Callable[[ReplyText, Context], Steps]


@dataclass(frozen=True, slots=True)
class ReplyKind:
    """A kind of replies. `finds` is what it takes out: reasoning, calls, or both (`whole`). A chat
    template is of this kind if all of `signs` and none of `others` are in it. `markers` may be
    special tokens. The texts of `breaks` also end reasoning that has not ended."""

    name: str
    finds: str
    parse: Parse
    signs: tuple[str, ...]
    others: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()

    def suits(self, template: str) -> bool:
        """Return whether a chat template makes replies of this kind."""
        return all(sign in template for sign in self.signs) and not any(
            other in template for other in self.others
        )


def reply_kind(
    name: str,
    finds: str,
    *,
    signs: tuple[str, ...],
    others: tuple[str, ...] = (),
    markers: tuple[str, ...] = (),
    breaks: tuple[str, ...] = (),
) -> Callable[[Parse], Parse]:
    """Register the decorated generator as the parser of a kind of replies (ReplyKind). Raises
    BadUsage for a name that another parser has."""

    def register(parse: Parse) -> Parse:
        if name in _KINDS and _KINDS[name].parse is not parse:
            raise BadUsage(f"{name} cannot be the name of a kind of replies: it is taken")
        _KINDS[name] = ReplyKind(name, finds, parse, signs, others, markers, breaks)
        return parse

    return register


def known_kinds() -> dict[str, ReplyKind]:
    """Return all kinds by name, also those of other packages. Raises Incompatible for a package
    that cannot be imported."""
    for name in _FILES.split():
        import_module(f"runtime.session.replies.kinds.{name}")
    for name, entry in installed(_GROUP).items():
        load(f"kind of replies {name}", entry, partial(_check_registered, name))
    return _KINDS


def _check_registered(name: str, parse: object) -> None:
    if name not in _KINDS or _KINDS[name].parse is not parse:
        raise BadUsage(f"it registers no {name} by reply_kind")


def kind_of(template: str, finds: str) -> ReplyKind | None:
    """Return the one kind that a chat template is of; None where it is of none, or of several."""
    kinds = known_kinds().values()
    found = [kind for kind in kinds if kind.finds == finds and kind.suits(template)]
    return found[0] if len(found) == 1 else None

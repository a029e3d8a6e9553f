"""The form in which a model writes a reply, by which the reply is taken apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from runtime.session.replies.arguments import json_calls
from runtime.session.replies.pieces import Piece, TextPiece
from runtime.session.replies.registry import (
    CALLS,
    REASONING,
    WHOLE,
    Context,
    ReplyKind,
    kind_of,
)
from runtime.session.replies.source import Parsing

_END = 64  # characters of a prompt in which a reply may have begun


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """A form of replies: the kinds of their parts, in the order in which they are taken out. At
    most `max_calls` tools are called."""

    kinds: tuple[ReplyKind, ...] = ()
    context: Context = Context()
    max_calls: int | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Texts that a parser must see, also where they are special tokens, which else are no part
        of a reply's text."""
        return frozenset(marker for kind in self.kinds for marker in kind.markers)

    def without(self, found: str) -> "ReplyForm":
        """Return the form without the kinds that find these parts."""
        return replace(self, kinds=tuple(kind for kind in self.kinds if kind.finds != found))

    def parser(self) -> "ReplyParser":
        """Return a parser for one reply."""
        return ReplyParser(self)


PLAIN = ReplyForm()
_FORCED = ReplyKind("json", WHOLE, json_calls, signs=())


def form_of(
    template: str,
    *,
    prompt_end: str,
    tools: Sequence[Mapping[str, object]] = (),
    max_calls: int | None = None,
    must_call: bool = False,
    is_formed: bool = False,
) -> ReplyForm:
    """Return the form of replies to a prompt that a chat template made, with the tools, as OpenAI's
    reference has them, that the model may call. Calls are looked for only where there are tools;
    with `must_call` what follows reasoning is one, as JSON, and with `is_formed` text."""
    whole = kind_of(template, WHOLE)
    is_held = must_call or is_formed
    reasoning = None if whole else kind_of(template, REASONING)
    kind = None if is_held else whole
    calls = kind_of(template, CALLS) if tools and not (whole or is_held) else None
    forced = _FORCED if must_call else None
    found = tuple(one for one in (kind, reasoning, calls, forced) if one is not None)
    context = Context(prompt_end[-_END:], _schemas(tools), calls.breaks if calls else ())
    return ReplyForm(found, context, max_calls)


def _schemas(tools: Sequence[Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Return the schema of each tool's arguments, by its name."""
    functions = [tool["function"] for tool in tools]
    return {one["name"]: one.get("parameters") or {} for one in functions}


class ReplyParser:
    """Takes one reply apart while its text comes: hands the text that the parser of one kind leaves
    to that of the next."""

    def __init__(self, form: ReplyForm) -> None:
        self._parsers = [Parsing(partial(kind.parse, context=form.context)) for kind in form.kinds]

    def add(self, text: str) -> list[Piece]:
        """Return what is certain with this text; the begin of a marker is held back."""
        pieces: list[Piece] = [TextPiece(text)] if text else []
        for parser in self._parsers:
            pieces = _taken_apart(pieces, parser)
        return pieces

    def rest(self) -> list[Piece]:
        """Return what was held back, when no text follows."""
        pieces: list[Piece] = []
        for parser in self._parsers:
            pieces = [*_taken_apart(pieces, parser), *parser.rest()]
        return pieces


def _taken_apart(pieces: list[Piece], parser: Parsing) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        found += parser.add(piece.text) if isinstance(piece, TextPiece) else [piece]
    return found

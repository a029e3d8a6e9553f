"""Calls of tools as pieces. Arguments in JSON are passed on piece by piece; arguments that a model
writes one by one are joined to a JSON object."""

import json
import re
from collections.abc import Generator, Mapping

from artifacts.common.untrusted import parse_json
from runtime.session.replies.pieces import ArgumentsPiece, CallPiece, Piece, TextPiece
from runtime.session.replies.registry import Context
from runtime.session.replies.source import ReplyText, Steps

Step = Generator[Piece | None, None, str]
"""Pieces, and the marker at the end of them."""

_STRING = r'("(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")'
_HEAD = re.compile(rf'\s*{{\s*"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?={{)')
_LONGEST_HEAD = 512  # characters of a call before its arguments; a longer call is read whole
_PARTS = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_OF_PYTHON = {"True": True, "False": False, "None": None}
_TYPES = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class Calls:
    """Makes the pieces of a reply's calls, of which `num` have begun."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.num = 0
        self._schemas: Mapping[str, object] = {}
        self._num_members = 0

    def begin(self, name: str, id: str | None = None) -> CallPiece:
        """Return the begin of the next call."""
        self.num += 1
        self._num_members = 0
        properties = self._context.tools.get(name, {}).get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        return CallPiece(self.num - 1, id or self._context.new_id(), name)

    def arguments(self, text: str) -> ArgumentsPiece:
        """Return text of the arguments of the call that began last."""
        return ArgumentsPiece(self.num - 1, text)

    def whole(self, name: str, arguments: str) -> list[Piece]:
        """Return a call of which everything is known."""
        return [self.begin(name), self.arguments(arguments or "{}")]

    def member(
        self, source: ReplyText, key: str, closing: str, *, is_text: bool | None = None, trims: bool
    ) -> Step:
        """Pass on an argument that is written up to a marker, a text while it comes. Without
        `is_text` the tool's schema says what it is. With `trims` a text has line ends around it
        that are no part of it."""
        types = types_of(self._schemas.get(key))
        yield self.arguments(("{" if not self._num_members else ", ") + json.dumps(key) + ": ")
        self._num_members += 1
        if types == {"string"} if is_text is None else is_text:
            return (yield from self._text(source, closing, trims=trims))
        raw, marker = yield from source.all_upto(closing)
        if marker:
            raw = typed(raw.strip(), types if is_text is None else set())
        if raw:
            yield self.arguments(raw)
        return marker

    def end(self) -> ArgumentsPiece:
        """Return the end of arguments that came one by one."""
        return self.arguments("}" if self._num_members else "{}")

    def _text(self, source: ReplyText, closing: str, *, trims: bool) -> Step:
        yield self.arguments('"')
        held = ""
        is_first = trims
        while True:
            taken, marker = yield from source.upto(closing)
            if is_first and taken:
                taken = taken.removeprefix("\n")
                is_first = False
            text = held + taken
            held = "\n" if trims and text.endswith("\n") else ""
            text = text.removesuffix(held)
            if text:
                yield self.arguments(json.dumps(text)[1:-1])
            if marker is not None:
                if marker:
                    yield self.arguments('"')
                return marker


def typed(raw: str, types: set[str]) -> str:
    """Return as JSON what a model wrote for an argument of some JSON types, which may be unknown;
    as a JSON text where it is nothing else."""
    try:
        return as_json(value_of(raw, types))
    except ValueError:
        return json.dumps(raw)


def value_of(raw: str, types: set[str]) -> object:
    """Return the value that a model wrote, as `typed` does."""
    try:
        value = _OF_PYTHON[raw] if raw in _OF_PYTHON else parse_json(raw)
    except ValueError:
        return raw
    return raw if "string" in types and not types.intersection(_TYPES[type(value)]) else value


def as_json(value: object) -> str:
    """Return JSON in ASCII. Raises ValueError for what JSON does not have, and for a value that is
    nested too deeply."""
    try:
        return json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def types_of(schema: object) -> set[str]:
    """Return the JSON types that a schema names, in its alternatives too."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = set(named if isinstance(named, list) else [named]) - {None}
    choices = [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    for choice in choices:
        if isinstance(choice, Mapping) and isinstance(choice.get("type"), str):
            found.add(choice["type"])
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found = {_TYPES[type(value)][0] for value in values if type(value) in _TYPES}
    return found


def json_upto(source: ReplyText, calls: Calls, *closing: str, in_strings: bool = False) -> Step:
    """Pass on a JSON value as arguments, as it comes, up to a marker; what follows the value is
    left out. With `in_strings` a marker may stand in a string of it. Without markers the text after
    the value is left in the source."""
    value = _Value()
    last = ""
    is_empty = True
    while True:
        taken, marker = yield from source.upto(*closing)
        text = value.part(taken if not is_empty else taken.lstrip())
        last = taken[-1:] or last
        if text:
            is_empty = False
            yield calls.arguments(text)
        if not closing and value.is_over:
            source.give_back(taken[len(taken) - value.num_after :])
            return ""
        if marker and in_strings and value.is_string and last != "\n":
            yield calls.arguments(value.part(marker))
        elif marker is not None:
            if is_empty:
                yield calls.arguments("{}")
            return marker


class _Value:
    """Follows a JSON object or array to its end. In a string are neither ends nor line ends."""

    def __init__(self) -> None:
        self.is_string = False
        self.is_over = False
        self.num_after = 0  # characters of the last part that follow the value
        self._depth = 0
        self._is_escaped = False

    def part(self, text: str) -> str:
        """Return what of the next text belongs to the value."""
        if self.is_over:
            self.num_after = len(text)
            return ""
        begin = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        for found in _PARTS.finditer(text, begin):
            sign = found[0]
            self._is_escaped = sign == "\\"
            if self.is_string:
                self.is_string = sign != '"'
            elif sign == '"':
                self.is_string = True
            else:
                self._depth += (sign in "{[") - (sign in "}]")
                if self._depth <= 0 and sign in "}]":
                    self.is_over = True
                    self.num_after = len(text) - found.end()
                    return text[: found.end()]
        return text


def object_upto(source: ReplyText, calls: Calls, *closing: str, opening: str) -> Step:
    """Pass on the call that a JSON object with `name` and `arguments` (or `parameters`) makes, or
    the calls of a list of them, up to a marker, and return it. Anything else is text, with the
    markers around it."""
    head = ""
    marker: str | None = None
    while marker is None and len(head) <= _LONGEST_HEAD:
        taken, marker = yield from source.upto(*closing)
        head += taken
        if found := _HEAD.match(head[:_LONGEST_HEAD]):
            source.give_back(head[found.end() :] + (marker or ""))
            yield calls.begin(json.loads(found[1], strict=False))
            return (yield from json_upto(source, calls, *closing, in_strings=True))
    rest = ""
    if marker is None:
        rest, marker = yield from source.all_upto(*closing)
    body = head + rest
    made = _made(body)
    for name, arguments in made:
        yield from calls.whole(name, arguments)
    if not made:
        yield TextPiece(opening + body + marker)
    return marker


def _made(body: str) -> list[tuple[str, str]]:
    """Return name and arguments of the calls that a JSON text makes, none for any other text.
    Arguments that are a text stand as they are."""
    try:
        found = parse_json(body)
        return [
            (one["name"] + "", given if isinstance(given, str) else as_json(given))
            for one in (found if isinstance(found, list) else [found])
            for given in [one.get("arguments", one.get("parameters")) or {}]
        ]
    except (ValueError, TypeError, LookupError, AttributeError):  # another value than is expected
        return []


def json_calls(source: ReplyText, context: Context) -> Steps:
    """Take out the calls of a reply that is nothing but JSON objects with `name` and `parameters`
    (or `arguments`), maybe with semicolons between them."""
    calls = Calls(context)
    is_call = (yield from source.blank_upto("{")) == "{"
    while is_call:
        source.give_back("{")
        head, marker = "", None
        while marker is None and len(head) < _LONGEST_HEAD and not _HEAD.match(head):
            taken, marker = yield from source.upto()
            head += taken
        source.give_back(head)
        is_call = _HEAD.match(head) is not None
        if is_call:
            yield from object_upto(source, calls, opening="")
            is_call = (yield from source.all_upto("{"))[1] == "{"
    yield from source.pass_upto()

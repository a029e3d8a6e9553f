"""Calls in tags that are named as the parameters are: MiniMax M3."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.session.replies.arguments import Calls, as_json, types_of, value_of
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_MARK = "]<]minimax[>["
_BEGIN = f"{_MARK}<tool_call>"
_END = f"{_MARK}</tool_call>"
_INVOKE = f'{_MARK}<invoke name="'
_TAG = re.compile(r"<(/?)([^<>]+)>(.*)", re.DOTALL)


@dataclass(slots=True)
class _Node:
    """An element that is being read: its tag, its text, and the values of those within it."""

    tag: str
    schema: Mapping[str, object]
    text: str = ""
    inner: list[tuple[str, object]] = field(default_factory=list)

    def value(self) -> object:
        if self.inner and all(tag == "item" for tag, _ in self.inner):
            return [value for _, value in self.inner]
        types = types_of(self.schema)
        if self.inner or (not self.text and "object" in types):
            return dict(self.inner)
        return [] if not self.text and "array" in types else value_of(self.text, types)

    def schema_of(self, tag: str) -> Mapping[str, object]:
        inner = self.schema.get("items" if tag == "item" else "properties")
        if tag != "item" and isinstance(inner, Mapping):
            inner = inner.get(tag)
        return inner if isinstance(inner, Mapping) else {}


@reply_kind("minimax_m3", CALLS, signs=(_MARK,), markers=(_MARK,))
def minimax_m3(source: ReplyText, context: Context) -> Steps:
    """Take out calls; within a value, tags are the names of its members, or `item`."""
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(_BEGIN, begun=begun)):
        before, marker = yield from source.all_upto(_INVOKE, _END)
        begun = marker != _INVOKE
        if begun:
            yield TextPiece(source.blank + _BEGIN + before + marker)
        while marker == _INVOKE:
            name, marker = yield from source.all_upto('">')
            body, marker = yield from source.all_upto(f"{_MARK}</invoke>", _END)
            arguments = _arguments(body, context.tools.get(name, {}))
            yield from calls.whole(name, arguments if marker else body)
            if marker != _END:
                _, marker = yield from source.all_upto(_INVOKE, _END)


def _arguments(body: str, schema: Mapping[str, object]) -> str:
    """Return the JSON of the elements in a text, or the text where it has other ones."""
    nodes = [_Node("", schema)]
    for part in body.split(_MARK)[1:]:
        found = _TAG.fullmatch(part)
        if found is None or (found[1] and found[2] != nodes[-1].tag):
            return body
        if found[1]:
            node = nodes.pop()
            nodes[-1].inner.append((node.tag, node.value()))
        else:
            nodes.append(_Node(found[2], nodes[-1].schema_of(found[2]), found[3].strip()))
    try:
        return as_json(dict(nodes[0].inner)) if len(nodes) == 1 else body
    except ValueError:
        return body

"""Calls in Gemma's own notation, JSON with bare keys and marks as quotes: Gemma 4."""

import json
import re

from runtime.session.replies.arguments import Calls
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "<|tool_call>"
_END = "<tool_call|>"
_QUOTE = '<|"|>'
_KEY = re.compile(r"([{,]\s*)([\w.$-]+)(\s*:)")
_CALL = re.compile(r"\s*call:\s*([\w.-]+)\s*(\{.*)?", re.DOTALL)


@reply_kind("gemma", CALLS, signs=(_BEGIN, _END), markers=(_BEGIN, _END, _QUOTE))
def gemma(source: ReplyText, context: Context) -> Steps:
    """Take out calls."""
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(_BEGIN, begun=begun)):
        body, marker = yield from source.all_upto(_END)
        found = _CALL.fullmatch(body)
        begun = found is None
        if found is None:
            yield TextPiece(source.blank + _BEGIN + body + marker)
        else:
            yield from calls.whole(found[1], _json(found[2] or ""))


def _json(text: str) -> str:
    """Return as JSON what stands between marks in turn as it is and as a text."""
    bare, *others = text.split(_QUOTE)
    parts = [_KEY.sub(r'\1"\2"\3', bare)]
    for number, part in enumerate(others):
        parts.append(_KEY.sub(r'\1"\2"\3', part) if number % 2 else json.dumps(part))
    return "".join(parts).strip()

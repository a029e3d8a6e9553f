"""Messages in channels: gpt-oss. What the package openai-harmony reads from tokens needs its
vocabulary from the network, so the marks are read from text."""

import re

from runtime.session.replies.arguments import Calls, Step, json_upto
from runtime.session.replies.pieces import ReasoningPiece, TextPiece
from runtime.session.replies.registry import WHOLE, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START)
_TO = re.compile(r"to=([^\s<]+)")
_IN = re.compile(r"<\|channel\|>\s*(\w+)")


@reply_kind(
    "harmony",
    WHOLE,
    signs=(_CHANNEL, _MESSAGE),
    markers=(_CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS),
)
def harmony(source: ReplyText, context: Context) -> Steps:
    """Take out the channel of analysis as reasoning, and messages to functions as calls; all other
    messages are text."""
    calls = Calls(context)
    said: set[type] = set()
    is_first = True
    marker: str = _START
    while marker:
        head, marker = yield from source.all_upto(_MESSAGE, *_ENDS)
        if is_first and marker != _MESSAGE and _CHANNEL not in head and head.strip():
            yield TextPiece(head)
        is_first = False
        if marker == _MESSAGE:
            marker = yield from _message(source, calls, head, said)


def _message(source: ReplyText, calls: Calls, head: str, said: set[type]) -> Step:
    """Take a message whose head is known; `said` has the kinds of the messages before it."""
    to = _TO.search(head)
    if to:
        yield calls.begin(to[1].removeprefix("functions."))
        return (yield from json_upto(source, calls, *_ENDS))
    channel = _IN.search(head)
    kind = ReasoningPiece if channel and channel[1] == "analysis" else TextPiece
    if kind in said:
        yield kind("\n\n")
    said.add(kind)
    return (yield from source.pass_upto(*_ENDS, kind=kind))

"""Calls in sections between Kimi's special tokens: Kimi K2."""

from runtime.session.replies.arguments import Calls, json_upto
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_SECTION = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_BEGIN = "<|tool_call_begin|>"
_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"


@reply_kind(
    "kimi",
    CALLS,
    signs=(_SECTION, _ARGUMENTS),
    markers=(_SECTION, _SECTION_END, _BEGIN, _END, _ARGUMENTS),
    breaks=(_SECTION,),
)
def kimi(source: ReplyText, context: Context) -> Steps:
    """Take out calls, whose ids are the model's: `functions.NAME:INDEX`, as its template wants
    them again."""
    calls = Calls(context)
    begun = True
    while marker := (yield from source.pass_upto(_SECTION, _BEGIN, _SECTION_END, begun=begun)):
        begun = False
        if marker != _BEGIN:
            continue
        id, marker = yield from source.all_upto(_ARGUMENTS, _END, _SECTION_END)
        if marker == _ARGUMENTS:
            id = id.strip()
            yield calls.begin(id.removeprefix("functions.").rpartition(":")[0] or id, id)
            yield from json_upto(source, calls, _END)
        else:
            yield TextPiece(_BEGIN + id + marker)

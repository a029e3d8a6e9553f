"""Calls in tags of functions and parameters: Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step."""

from runtime.session.replies.arguments import Calls
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="


@reply_kind(
    "qwen_xml",
    CALLS,
    signs=(_BEGIN, _FUNCTION, _PARAMETER),
    others=("<seed:tool_call>",),
    markers=(_BEGIN, _END),
)
def qwen_xml(source: ReplyText, context: Context) -> Steps:
    """Take out calls."""
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(_BEGIN, begun=begun)):
        before, marker = yield from source.all_upto(_FUNCTION, _END)
        if marker != _FUNCTION:
            yield TextPiece(source.blank + _BEGIN + before + marker)
        begun = marker != _FUNCTION
        while marker == _FUNCTION:
            yield from _function(source, calls)
            _, marker = yield from source.all_upto(_FUNCTION, _END)


def _function(source: ReplyText, calls: Calls) -> Steps:
    name, marker = yield from source.all_upto(">")
    if not marker:
        yield TextPiece(_BEGIN + _FUNCTION + name)
        return
    yield calls.begin(name.strip())
    while True:
        _, marker = yield from source.all_upto(_PARAMETER, _FUNCTION_END, _END)
        if marker != _PARAMETER:
            break
        key, marker = yield from source.all_upto(">")
        if marker:
            marker = yield from calls.member(source, key.strip(), "</parameter>", trims=True)
        if not marker:
            return
    if marker:
        yield calls.end()
    if marker == _END:
        source.give_back(marker)

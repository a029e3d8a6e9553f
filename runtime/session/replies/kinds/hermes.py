"""Calls as JSON objects in `<tool_call>`: Qwen 2.5 and 3, Hermes, Granite 4, Ernie."""

from runtime.session.replies.arguments import Calls, object_upto
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "<tool_call>"
_END = "</tool_call>"


@reply_kind(
    "hermes",
    CALLS,
    signs=(_BEGIN, _END),
    others=("<function=", "<arg_key>", "<tool_sep>", "]<]minimax[>["),
    markers=(_BEGIN, _END),
)
def hermes(source: ReplyText, context: Context) -> Steps:
    """Take out calls."""
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(_BEGIN, begun=begun)):
        num_before = calls.num
        yield from object_upto(source, calls, _END, opening=source.blank + _BEGIN)
        begun = calls.num == num_before

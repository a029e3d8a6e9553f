"""Calls with a name and pairs of keys and values: GLM 4.5 and later."""

from runtime.session.replies.arguments import Calls
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"


@reply_kind(
    "glm",
    CALLS,
    signs=(_BEGIN, _KEY, _VALUE),
    markers=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
)
def glm(source: ReplyText, context: Context) -> Steps:
    """Take out calls."""
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(_BEGIN, begun=begun)):
        begun = False
        name, marker = yield from source.all_upto(_KEY, _END)
        yield calls.begin(name.strip())
        while marker == _KEY:
            key, marker = yield from source.all_upto(_KEY_END)
            if marker:
                _, marker = yield from source.all_upto(_VALUE, _END)
            if marker == _VALUE:
                marker = yield from calls.member(source, key.strip(), _VALUE_END, trims=False)
            if marker == _VALUE_END:
                _, marker = yield from source.all_upto(_KEY, _END)
        if marker:
            yield calls.end()

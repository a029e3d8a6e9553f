"""Calls as a list of JSON objects with `tool_name` and `parameters`: Command A."""

from artifacts.common.untrusted import parse_json
from runtime.session.replies.arguments import Calls, as_json
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "<|START_ACTION|>"
_END = "<|END_ACTION|>"


@reply_kind("cohere", CALLS, signs=(_BEGIN, "tool_name"), markers=(_BEGIN, _END))
def cohere(source: ReplyText, context: Context) -> Steps:
    """Take out calls."""
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(_BEGIN, begun=begun)):
        body, marker = yield from source.all_upto(_END)
        made = _made(body)
        begun = not made
        for name, arguments in made:
            yield from calls.whole(name, arguments)
        if not made:
            yield TextPiece(source.blank + _BEGIN + body + marker)


def _made(body: str) -> list[tuple[str, str]]:
    try:
        return [(one["tool_name"] + "", as_json(one["parameters"])) for one in parse_json(body)]
    except (ValueError, TypeError, LookupError):  # no list of calls
        return []

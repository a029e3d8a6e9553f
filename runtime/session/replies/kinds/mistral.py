"""Calls after `[TOOL_CALLS]`: Mistral."""

import re
import secrets

from runtime.session.replies.arguments import Calls, json_upto, object_upto
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_NAME = re.compile(r"\s*[\w.-]+\s*")


@reply_kind("mistral", CALLS, signs=(_BEGIN,), markers=(_BEGIN, _ID, _ARGUMENTS))
def mistral(source: ReplyText, context: Context) -> Steps:
    """Take out calls: a list of JSON objects, or a name, maybe an id, and JSON. Ids have nine
    characters, as its template wants them."""
    calls = Calls(context)
    marker = yield from source.pass_upto(_BEGIN)
    while marker:
        name, marker = yield from source.all_upto(_ARGUMENTS, _ID, "{", _BEGIN)
        id = secrets.token_hex(5)[:9]
        if marker == _ID:
            id, marker = yield from source.all_upto(_ARGUMENTS, _BEGIN)
        if _NAME.fullmatch(name):
            yield calls.begin(name.strip(), id)
            if marker == "{":
                source.give_back(marker)
            marker = yield from json_upto(source, calls, _BEGIN)
        else:
            source.give_back(name + marker)
            marker = yield from object_upto(source, calls, _BEGIN, opening=source.blank + _BEGIN)

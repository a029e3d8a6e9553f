"""Replies that are calls as JSON objects with `name` and `parameters`: Llama 3 and 4."""

from runtime.session.replies.arguments import json_calls
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_MARK = "<|python_tag|>"


@reply_kind("llama", CALLS, signs=('"parameters"', "ipython"), markers=(_MARK,))
def llama(source: ReplyText, context: Context) -> Steps:
    """Take out calls."""
    yield from source.blank_upto(_MARK)
    yield from json_calls(source, context)

"""Calls as JSON objects, or lists of them, between two marks, or after one."""

from functools import partial

from runtime.session.replies.arguments import Calls, object_upto
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),  # Qwen 2.5 and 3, Hermes, Granite 4, Ernie
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "granite": ("<|tool_call|>",),  # Granite 3
}
_OF_OTHERS = ("<function=", "<arg_key>", "<tool_sep>", "]<]minimax[>[")


def _marked(source: ReplyText, context: Context, marks: tuple[str, ...]) -> Steps:
    calls = Calls(context)
    begun = True
    while (yield from source.pass_upto(marks[0], begun=begun)):
        num_before = calls.num
        yield from object_upto(source, calls, *marks[1:], opening=source.blank + marks[0])
        begun = calls.num == num_before


for _name, _marks in _MARKS.items():
    reply_kind(_name, CALLS, signs=_marks, others=_OF_OTHERS, markers=_marks)(
        partial(_marked, marks=_marks)
    )

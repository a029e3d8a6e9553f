"""Calls between DeepSeek's special tokens: DeepSeek V3, R1 and V3.1."""

from runtime.session.replies.arguments import Calls, json_upto
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_BEGIN = "<｜tool▁call▁begin｜>"
_END = "<｜tool▁call▁end｜>"
_NAME_END = "<｜tool▁sep｜>"


@reply_kind(
    "deepseek",
    CALLS,
    signs=(_BEGIN, _NAME_END),
    markers=(_SECTION, _SECTION_END, _BEGIN, _END, _NAME_END),
    breaks=(_SECTION,),
)
def deepseek(source: ReplyText, context: Context) -> Steps:
    """Take out calls. V3 writes `function`, the name, and JSON in a block of code; V3.1 the name
    and JSON."""
    calls = Calls(context)
    begun = True
    while marker := (yield from source.pass_upto(_SECTION, _BEGIN, _SECTION_END, begun=begun)):
        begun = False
        if marker != _BEGIN:
            continue
        name, marker = yield from source.all_upto(_NAME_END, _END, _SECTION_END)
        if marker == _NAME_END:
            yield from _call(source, calls, name)
        else:
            yield TextPiece(_BEGIN + name + marker)


def _call(source: ReplyText, calls: Calls, name: str) -> Steps:
    before, marker = yield from source.all_upto("```json", "{", _END)
    yield calls.begin(before.strip() or name.strip())
    if marker != "```json":
        source.give_back(marker)
    yield from json_upto(source, calls, _END)

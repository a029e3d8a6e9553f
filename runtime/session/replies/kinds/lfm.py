"""Calls as a list of Python calls: LFM 2."""

import ast

from runtime.session.replies.arguments import Calls, as_json
from runtime.session.replies.pieces import TextPiece
from runtime.session.replies.registry import CALLS, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_BEGIN = "<|tool_call_start|>"
_END = "<|tool_call_end|>"
_LONGEST = 100_000  # characters: Python's own parser takes memory a thousand times that


@reply_kind("lfm", CALLS, signs=("<|tool_list_start|>",), markers=(_BEGIN, _END))
def lfm(source: ReplyText, context: Context) -> Steps:
    """Take out calls whose arguments are named literals."""
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
        if len(body) > _LONGEST:
            return []
        tree = ast.parse(body.strip(), mode="eval").body
        return [
            (
                ast.unparse(call.func),
                as_json({one.arg: ast.literal_eval(one.value) for one in call.keywords}),
            )
            for call in (tree.elts if isinstance(tree, ast.List) else [tree])
        ]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return []  # no list of calls

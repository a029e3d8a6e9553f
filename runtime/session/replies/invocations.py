"""Tags `invoke` and `parameter` with names in quotes, as DeepSeek and MiniMax write calls."""

import re
from collections.abc import Generator

from runtime.session.replies.arguments import Calls
from runtime.session.replies.pieces import Piece, TextPiece
from runtime.session.replies.registry import Context
from runtime.session.replies.source import ReplyText, Steps

_NAME = re.compile(r"""name\s*=\s*["']?([^"'>]*)""")
_IS_TEXT = re.compile(r"""string\s*=\s*["']?(true|false)""")


def invoked(source: ReplyText, context: Context, sections: tuple[str, ...], *, mark: str) -> Steps:
    """Take out the calls in sections whose tags all begin with `mark`. A parameter may say whether
    it is a text (`string="true"`)."""
    calls = Calls(context)
    begun = True
    opening = tuple(f"<{mark}{section}>" for section in sections)
    while section := (yield from source.pass_upto(*opening, begun=begun)):
        closing = f"</{section[1:]}"
        before, marker = yield from source.all_upto(f"<{mark}invoke", closing)
        begun = marker in (closing, "")
        if begun:
            yield TextPiece(source.blank + section + before + marker)
        while marker not in (closing, ""):
            yield from _invoke(source, calls, mark, closing)
            _, marker = yield from source.all_upto(f"<{mark}invoke", closing)


def _invoke(
    source: ReplyText, calls: Calls, mark: str, closing: str
) -> Generator[Piece | None, None, None]:
    head, marker = yield from source.all_upto(">")
    named = _NAME.search(head)
    if not (named and marker):
        yield TextPiece(f"<{mark}invoke{head}{marker}")
        return
    yield calls.begin(named[1].strip())
    parameter = f"<{mark}parameter"
    while True:
        _, marker = yield from source.all_upto(parameter, f"</{mark}invoke>", closing)
        if marker != parameter:
            break
        head, marker = yield from source.all_upto(">")
        named = _NAME.search(head)
        if marker and named:
            said = _IS_TEXT.search(head)
            is_text = said[1] == "true" if said else None
            end = f"</{mark}parameter>"
            marker = yield from calls.member(source, named[1], end, is_text=is_text, trims=False)
        if not marker:
            return
    if marker:
        yield calls.end()
    if marker == closing:
        source.give_back(marker)

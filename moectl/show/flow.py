"""Text on stdout as it is generated: verbatim to a pipe or a file, on a terminal in whole words or
as Markdown."""

import re
import sys
from collections.abc import Iterable
from itertools import groupby
from time import perf_counter

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from runtime.session.replies.pieces import Piece, ReasoningPiece, TextPiece

_WORDS = re.compile(r"\n|[^\S\n]+|\S+")
_EVERY_S = 0.1  # between two looks of an answer
_RENDER_SHARE = 10  # of that time, one part for rendering, which a long answer takes more of
_FRAME = 2  # lines of the screen that an answer leaves free


def flow(pieces: Iterable[str], *, prompt: str = "") -> None:
    """Print pieces as they come, and end the line after them. On a terminal the prompt stands
    before them, and a word that would be broken at the edge begins the next line, which delays each
    word until it is whole."""
    console = Console(highlight=False)
    words = _Words(console.width) if console.is_terminal else None
    if words:
        console.print(
            words.add(prompt) + words.rest(), style="bold", end="", markup=False, soft_wrap=True
        )
    for piece in pieces:
        sys.stdout.write(words.add(piece) if words else piece)
        sys.stdout.flush()
    print(words.rest() if words else "")


def shows_markdown() -> bool:
    """Return whether stdout is a terminal on which lines can be written anew."""
    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def flow_markdown(pieces: Iterable[Piece]) -> None:
    """Show an answer as Markdown while it comes, and dimmed what was thought before it. Calls of
    tools are not shown."""
    console = Console(highlight=False)
    said = (one for one in pieces if isinstance(one, TextPiece | ReasoningPiece) and one.text)
    for kind, run in groupby(said, key=type):
        texts = (_harmless(one.text) for one in run)
        (_flow_markdown if kind is TextPiece else _flow_dimmed)(texts, console)


def show_aside(line: str) -> None:
    """Print a line on stderr, dimmed on a terminal."""
    Console(stderr=True, highlight=False).print(line, style="dim", markup=False, soft_wrap=True)


def _harmless(text: str) -> str:
    """Return a text without the character that begins commands to a terminal."""
    return text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")


def _flow_dimmed(texts: Iterable[str], console: Console) -> None:
    words = _Words(console.width)
    own = {"style": "dim", "end": "", "markup": False, "soft_wrap": True}
    for text in texts:
        console.print(words.add(text), **own)
    console.print(f"{words.rest()}\n\n", **own)


def _flow_markdown(texts: Iterable[str], console: Console) -> None:
    """Show Markdown as it comes. The lines on the screen may change with the text after them; those
    that have left it are printed for good."""
    whole = ""
    num_printed = 0
    due_s = 0.0
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            for text in texts:
                whole += text
                begin_s = perf_counter()
                if begin_s < due_s:
                    continue
                lines = _rendered(whole, console)
                num_left = max(num_printed, len(lines) - console.height + _FRAME)
                if num_left > num_printed:
                    live.console.print(_joined(lines[num_printed:num_left]))
                num_printed = num_left
                live.update(_joined(lines[num_printed:]), refresh=True)
                now_s = perf_counter()
                due_s = now_s + max(_EVERY_S, _RENDER_SHARE * (now_s - begin_s))
    finally:
        console.print(_joined(_rendered(whole, console)[num_printed:]))


def _rendered(text: str, console: Console) -> list[list[Segment]]:
    return console.render_lines(Markdown(text, hyperlinks=False), pad=False)


def _joined(lines: Iterable[list[Segment]]) -> Segments:
    return Segments([part for line in lines for part in (*line, Segment.line())])


class _Words:
    """Breaks lines of at most `width` columns between words. Characters two columns wide, as
    Chinese has, need no space to break at."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._held = ""

    def add(self, text: str) -> str:
        """Return what can be shown by now; a word that may go on is held back."""
        *whole, self._held = [*_WORDS.findall(self._held + text), ""]
        if (
            whole
            and not whole[-1].isspace()
            and cell_len(whole[-1]) == len(whole[-1]) < self._width
        ):
            self._held = whole.pop()
        return "".join(map(self._placed, whole))

    def rest(self) -> str:
        """Return what is held back, when no text follows it."""
        held = self._held
        self._held = ""
        return self._placed(held)

    def _placed(self, part: str) -> str:
        if part == "\n":
            self._column = 0
            return part
        size = cell_len(part)
        begins_line = size < self._width < self._column + size and cell_len(part) == len(part)
        if begins_line and part.isspace():
            self._column = 0
            return "\n"
        self._column = size if begins_line else (self._column + size) % self._width
        return f"\n{part}" if begins_line else part

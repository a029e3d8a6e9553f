"""Text on stdout as it is generated: verbatim to a pipe or a file, in whole words on a terminal."""

import re
import sys
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console

_WORDS = re.compile(r"\n|[^\S\n]+|\S+")


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

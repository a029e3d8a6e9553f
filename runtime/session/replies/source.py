"""The text of a reply as it comes, for parsers that are written as generators.

A parser takes text from a ReplyText, yields pieces, and yields None where it needs more. What it
yields does not depend on where the text was cut, but for the borders of its pieces.
"""

import re
from collections.abc import Callable, Generator, Iterator
from functools import cache

from runtime.session.replies.pieces import Piece, ReasoningPiece, TextPiece

Steps = Iterator[Piece | None]
"""Pieces, and None for each time that more text is needed."""


class Parsing:
    """Runs a parser on the text of one reply, in time that grows with the text's length."""

    def __init__(self, parse: Callable[["ReplyText"], Steps]) -> None:
        self._source = ReplyText()
        self._steps = parse(self._source)

    def add(self, text: str) -> list[Piece]:
        """Return what is certain with this text; the begin of a marker is held back."""
        self._source.give(text)
        return self._run()

    def rest(self) -> list[Piece]:
        """Return what was held back, when no text follows."""
        self._source.is_over = True
        return self._run()

    def _run(self) -> list[Piece]:
        found: list[Piece] = []
        for piece in self._steps:
            if piece is None:
                break
            found.append(piece)
        return found


class ReplyText:
    """Holds the text of a reply that no parser has taken yet. Set `is_over` when no text follows.
    `blank` is the whitespace before a marker that `pass_upto` left out last."""

    def __init__(self) -> None:
        self.is_over = False
        self.blank = ""
        self._text = ""
        self._at = 0

    def give(self, text: str) -> None:
        """Add text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def give_back(self, text: str) -> None:
        """Put back text that was taken last."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def upto(self, *markers: str) -> Generator[None, None, tuple[str, str | None]]:
        """Take the text before the next marker, and the marker, which is None while the text goes
        on and empty at the end of the reply. No marker may begin with another."""
        while True:
            taken, marker = self._cut(markers)
            if taken or marker is not None:
                return taken, marker
            yield

    def all_upto(self, *markers: str) -> Generator[None, None, tuple[str, str]]:
        """Take all the text before the next marker, and the marker, empty at the end."""
        parts: list[str] = []
        while True:
            taken, marker = yield from self.upto(*markers)
            parts.append(taken)
            if marker is not None:
                return "".join(parts), marker

    def blank_upto(self, *markers: str) -> Generator[None, None, str | None]:
        """Take whitespace and the marker after it, which is returned, empty at the end of the
        reply; None where other text comes first, which is left here with all before it."""
        parts: list[str] = []
        while True:
            taken, marker = yield from self.upto(*markers)
            parts.append(taken)
            is_blank = not taken.strip()
            if not (is_blank and marker):
                if is_blank and marker is None:
                    continue
                self.give_back("".join(parts) + (marker or ""))
            return marker if is_blank else None

    def pass_upto(
        self, *markers: str, kind: type[TextPiece | ReasoningPiece] = TextPiece, begun: bool = True
    ) -> Generator[Piece | None, None, str]:
        """Pass text on up to the next marker, which is returned, empty at the end. Whitespace
        before a marker is left out; so is that before the first text, unless it has `begun`."""
        spaces: list[str] = []
        while True:
            taken, marker = yield from self.upto(*markers)
            taken = taken if begun else taken.lstrip()
            text = taken.rstrip()
            if text:
                begun = True
                yield kind("".join([*spaces, text]))
                spaces.clear()
            spaces.append(taken[len(text) :])
            if marker is None:
                continue
            self.blank = "".join(spaces)
            if self.blank and not marker and kind is TextPiece:
                yield TextPiece(self.blank)
            return marker

    def _cut(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        pattern, longest = _compiled(markers)
        found = pattern.search(self._text, self._at) if markers else None
        end = len(self._text) if self.is_over else self._held_from(markers, longest)
        if found and found.start() < end:
            taken = self._text[self._at : found.start()]
            self._at = found.end()
            return taken, found[0]
        taken = self._text[self._at : end]
        self._at = end
        return taken, "" if self.is_over else None

    def _held_from(self, markers: tuple[str, ...], longest: int) -> int:
        """Return where the first marker may begin of which only the begin is there."""
        size = len(self._text)
        for start in range(max(self._at, size - longest + 1), size):
            held = self._text[start:]
            if any(marker.startswith(held) and marker != held for marker in markers):
                return start
        return size


@cache
def _compiled(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    return re.compile("|".join(map(re.escape, markers))), max(map(len, markers), default=1)

"""The form in which a model writes its replies, by which each reply is taken apart."""

from dataclasses import dataclass
from typing import Protocol

from runtime.session.replies.pieces import Piece, TextPiece


class ReplyParser(Protocol):
    """Takes one reply apart while its text comes."""

    def add(self, text: str) -> list[Piece]:
        """Return what is certain with this text; the begin of a marker is held back."""

    def rest(self) -> list[Piece]:
        """Return what was held back, when no text follows."""


class PlainParser:
    """Takes a reply for text as it is."""

    def add(self, text: str) -> list[Piece]:
        return [TextPiece(text)] if text else []

    def rest(self) -> list[Piece]:
        return []


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """A form of replies. `markers` are the texts of special tokens that its parser must see; other
    special tokens are no part of a reply's text. At most `max_calls` tools are called."""

    markers: frozenset[str] = frozenset()
    max_calls: int | None = None

    def parser(self) -> ReplyParser:
        """Return a parser for one reply."""
        return PlainParser()


PLAIN = ReplyForm()

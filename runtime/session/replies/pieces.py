"""Pieces of a reply, as a parser of its kind finds them while text comes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next text of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next text of what a model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The begin of a call of a tool; `index` counts the calls of a reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """The next text of the arguments of call `index`; all of them together are one JSON object."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallPiece | ArgumentsPiece

"""A whole reply, put together from its pieces."""

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.session.replies.pieces import (
    ArgumentsPiece,
    CallPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` are the text of a JSON object, if the model wrote one."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The text of an answer, what the model thought before it, and its calls of tools."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Reply":
        """Join the pieces of one reply."""
        parts: dict[type, list[str]] = {TextPiece: [], ReasoningPiece: []}
        begun: list[CallPiece] = []
        arguments: list[list[str]] = []
        for piece in pieces:
            match piece:
                case CallPiece():
                    begun.append(piece)
                    arguments.append([])
                case ArgumentsPiece(index, text):
                    arguments[index].append(text)
                case _:
                    parts[type(piece)].append(piece.text)
        calls = (Call(one.id, one.name, "".join(arguments[one.index])) for one in begun)
        return cls("".join(parts[TextPiece]), "".join(parts[ReasoningPiece]), tuple(calls))

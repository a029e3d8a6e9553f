"""Drafts from the request's own text: what followed the longest earlier place that ends as the text
does now (prompt lookup: Saxena, 2023; chains of places as in Deflate, RFC 1951)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from artifacts.errors import BadUsage
from runtime.drafters.base import DraftPasses
from runtime.model.open import MoeModel

_MOST_PLACES = 64  # that are compared for one draft: the newest of those with the same end


@dataclass
class Ngram:
    """Drafts where at least `least` last tokens stand earlier in the text too. The place that
    agrees with the last `most` tokens, or with the longest end of them, is taken, the newest among
    equals."""

    name: ClassVar[str] = "ngram"
    wants_hidden: ClassVar[bool] = False

    least: int = 2
    most: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise BadUsage(f"ngram needs 1 <= least <= most, not {self.least} and {self.most}")

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Ngram":
        """Return the drafter by the text `LEAST` or `LEAST-MOST`. Raises BadUsage."""
        if argument is None:
            return cls()
        least, _, most = argument.partition("-")
        if not least.isdecimal() or not (most or "0").isdecimal():
            raise BadUsage(f"--draft ngram={argument}: give numbers of tokens, as ngram=2-16")
        return cls(int(least), int(most) if most else max(cls.most, int(least)))

    def begin(self, prompt: Sequence[int], passes: DraftPasses | None) -> "NgramDrafter":
        """Return the drafter of a request."""
        return NgramDrafter(self.least, self.most)

    def receipt(self) -> dict[str, object]:
        """Return what the drafter keeps beside the model."""
        return {"least": self.least, "most": self.most}


class NgramDrafter:
    """Knows by every `least` tokens in turn the newest place behind them, and from each place the
    one before it."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._text: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # by place; 0: there is none, no place has 0 tokens before it

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` drafts behind all tokens so far. Tokens that were given are never
        taken back."""
        place = self._place(tokens)
        if not place:
            return []
        drafts = self._text[place : place + most]
        for index in range(len(drafts), most):  # the end of the text repeats itself
            drafts.append(drafts[index - (len(self._text) - place)])
        return drafts

    def note(self, tokens: Sequence[int], output: object) -> None:
        """Do nothing: the text is read when the next draft is asked for."""

    def close(self) -> None:
        """Free the index."""
        self._text.clear()
        self._newest.clear()
        self._before.clear()

    def _place(self, tokens: Sequence[int]) -> int:
        """Return how many tokens stand before the best continuation, 0 where there is none."""
        self._read(tokens)
        text = self._text
        end = len(text)
        best = length = 0
        place = self._before[end] if end >= self._least else 0
        for _ in range(_MOST_PLACES):
            if not place or length == self._most:
                break
            same = self._least
            while same < min(place, self._most) and text[place - same - 1] == text[end - same - 1]:
                same += 1
            if same > length:
                best = place
                length = same
            place = self._before[place]
        return best

    def _read(self, tokens: Sequence[int]) -> None:
        """Add the tokens that are new to the index."""
        start = len(self._text)
        self._text.extend(tokens[start:])
        if not start:
            self._before.append(0)
        for place in range(start + 1, len(self._text) + 1):
            gram = tuple(self._text[max(place - self._least, 0) : place])
            self._before.append(self._newest.get(gram, 0) if place >= self._least else 0)
            if place >= self._least:
                self._newest[gram] = place

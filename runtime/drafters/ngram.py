"""Drafts what followed the same last tokens earlier in the prompt or the answer."""

from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.drafters.base import DraftPasses

_LONGEST = 4  # tokens that are looked up


class Ngram:
    """Prompt lookup: needs no model and no memory."""

    name: ClassVar[str] = "ngram"
    wants_hidden: ClassVar[bool] = False

    @classmethod
    def open(cls, opened: Any, argument: str | None) -> "Ngram":
        return cls()

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "Lookup":
        return Lookup()

    def receipt(self) -> dict[str, object]:
        return {}


class Lookup:
    """Looks the last tokens up in those before them."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        for length in range(min(_LONGEST, len(tokens) - 1), 0, -1):
            last = list(tokens[-length:])
            for begin in range(len(tokens) - length - 1, -1, -1):
                if list(tokens[begin : begin + length]) == last:
                    return tokens[begin + length : begin + length + most]
        return ()

    def note(self, tokens: Sequence[int], output: Any) -> None:
        """Do nothing: tokens are looked up where they lie."""

    def close(self) -> None:
        """Do nothing: nothing is kept."""

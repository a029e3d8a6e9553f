"""Text as tokens come: what each adds, once it can no longer change."""

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "�"  # the rest of a character is still to come


class Text:
    """Decodes token by token, each beside those just before it, as tokenizers join words by their neighbours."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last that were told, and what is not told yet
        self._num_told = 0

    def add(self, token_id: int) -> str:
        """What the token adds for good; empty while a character is not whole."""
        self._ids.append(token_id)
        more = self._more()
        if not more or more.endswith(_UNFINISHED):
            return ""
        self._ids = self._ids[self._num_told :]
        self._num_told = len(self._ids)
        return more

    def rest(self) -> str:
        """What is left when no token follows."""
        return self._more()

    def _more(self) -> str:
        told = self._decoded(self._ids[: self._num_told])
        return self._decoded(self._ids)[len(told) :]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Stops:
    """Lets text through until one of `stops` occurs in it; holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.is_met = False
        self._stops, self._held = stops, ""

    def add(self, text: str) -> str:
        """What is sure to belong to the answer."""
        held = self._held + text
        if found := [at for stop in self._stops if (at := held.find(stop)) >= 0]:
            self.is_met, self._held = True, ""
            return held[: min(found)]
        num_held = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def rest(self) -> str:
        """What was held back, when no text follows."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` may begin."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

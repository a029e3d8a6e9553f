"""Decodes tokens to text one by one."""

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "�"  # what an incomplete character decodes to


class Detokeniser:
    """Decodes each token together with those just before it, as tokenizers join words by their
    neighbours."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those returned last, and those whose text is not returned yet
        self._num_returned = 0

    def add(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        more = self._more()
        if not more or more.endswith(_UNFINISHED):
            return ""
        self._ids = self._ids[self._num_returned :]
        self._num_returned = len(self._ids)
        return more

    def rest(self) -> str:
        """The text not returned yet, when no token follows."""
        return self._more()

    def _more(self) -> str:
        returned = self._decoded(self._ids[: self._num_returned])
        return self._decoded(self._ids)[len(returned) :]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Stops:
    """Passes text on up to the first occurrence of one of `stops`; holds back text with which one
    may begin."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.is_met = False
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """The text that certainly belongs to the answer."""
        held = self._held + text
        if starts := [start for stop in self._stops if (start := held.find(stop)) >= 0]:
            self.is_met = True
            self._held = ""
            return held[: min(starts)]
        num_held = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def rest(self) -> str:
        """The text held back, when no text follows."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` with which `stop` may begin."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

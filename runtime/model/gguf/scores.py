"""Tokenization with a SentencePiece vocabulary by scores, for vocabularies whose result no order of
merges can give."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from tokenizers import PreTokenizedString, Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer, Split

SPACE = "▁"  # what a space is in such a vocabulary
_WORDS = f"{SPACE}+[^{SPACE}]*"


def by_score(ids: Mapping[str, int], scores: Sequence[float]) -> PreTokenizer:
    """Return the step of a tokenizer that splits a text into tokens. Of all neighbours that form a
    token together, those of the highest score are joined first, the leftmost among equals.

    A tokenizer with this step, which is in Python, cannot be stored.
    """
    step = PreTokenizer.custom(_ByScore(ids, scores))
    if any(SPACE in text.lstrip(SPACE) for text in ids):
        return step
    return pre_tokenizers.Sequence([Split(Regex(_WORDS), "isolated"), step])  # words share no token


class _ByScore:
    def __init__(self, ids: Mapping[str, int], scores: Sequence[float]) -> None:
        self._ids = ids
        self._scores = scores

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(
            lambda _, part: [part[start:end] for start, end in self._pieces(part.normalized)]
        )

    def _pieces(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each token."""
        ends = list(range(1, len(text) + 1))  # of the piece that begins at a character
        # of the piece that ends before the character after this one
        starts = list(range(len(text)))
        heap: list[tuple[float, int, int]] = []

        def consider(start: int) -> None:
            if ends[start] < len(text):
                end = ends[ends[start]]
                if (token := self._ids.get(text[start:end])) is not None:
                    heappush(heap, (-self._scores[token], start, end))

        for start in range(len(text)):
            consider(start)
        while heap:
            _, start, end = heappop(heap)
            middle = ends[start]
            if middle >= end or starts[middle - 1] != start or ends[middle] != end:
                continue  # one of them was joined with another
            ends[start] = end
            starts[end - 1] = start
            consider(start)
            if start:
                consider(starts[start - 1])
        start = 0
        while start < len(text):
            yield start, ends[start]
            start = ends[start]

"""A task of lm-evaluation-harness that needs no network: which of four passages does a text go on
from?

Passages are docstrings of the running Python's standard library, of modules that the bundled model
was not trained on (`profilers.text.python.is_held_out`). The likelihood of one and the same text is
compared after each passage, so that nothing but the passage can tell.
"""

import random
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from profilers.text.python import docstrings

NAME = "continuations"
COUNT = 480
CHOICES = 4
# characters, at least
_PASSAGE = 60
_TEXT = 30
_OF_A_MODULE = 20  # at most
_SEED = 0


def configuration() -> dict[str, Any]:
    """The task, as the harness takes it: a choice between contexts, for the continuation is always
    the same."""
    return {
        "task": NAME,
        "custom_dataset": _split,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "answer",
        "doc_to_choice": "{{passages}}",
        "doc_to_target": "{{text}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


def items(count: int) -> list[dict[str, Any]]:
    """Return `count` items, or as many as this Python has text for. Each has four `passages`;
    `text` follows the one at the index `answer`, and the others are of other modules."""
    r = random.Random(_SEED)
    pieces = list(_pieces(r))
    r.shuffle(pieces)
    return [_item(r, piece, pieces) for piece in pieces[:count]]


def _item(
    r: random.Random, piece: tuple[str, str, str], pieces: list[tuple[str, str, str]]
) -> dict[str, Any]:
    module, passage, text = piece
    passages = [
        passage,
        *r.sample([other for name, other, _ in pieces if name != module], CHOICES - 1),
    ]
    r.shuffle(passages)
    return {"passages": passages, "text": text, "answer": passages.index(passage)}


def _pieces(r: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield module, passage and the text that follows it, of pieces that do not overlap."""
    for document in docstrings(held_out=True):
        pieces = list(_cut(document.text))
        for passage, text in r.sample(pieces, min(len(pieces), _OF_A_MODULE)):
            yield document.name, passage, text


def _cut(text: str) -> Iterator[tuple[str, str]]:
    """Yield passages and what follows them, cut at single spaces: a tokenizer then has the same
    tokens for a text whatever stands before it."""
    spaces = [found.start() for found in re.finditer(r"(?<=\S) (?=\S)", text)]
    begin = 0
    while True:
        border = bisect_left(spaces, begin + _PASSAGE)
        end = bisect_left(spaces, spaces[border] + _TEXT) if border < len(spaces) else len(spaces)
        if end == len(spaces):
            return
        yield text[begin : spaces[border]], text[spaces[border] : spaces[end]]
        begin = spaces[end] + 1


def _split(**_: object) -> dict[str, Any]:
    """The harness gives metadata of its own."""
    import datasets

    return {"test": datasets.Dataset.from_list(items(COUNT))}

"""The five kinds of text the demo model is trained on, and the part of each that it never sees."""

import itertools
from collections.abc import Iterator

from profilers.text.files import Document
from profilers.text.python import docstrings, headers, reference, source_code
from tools.make.word_problems import word_problems

# Kind -> its share of the training sequences.
SHARES = {"docstrings": 0.27, "code": 0.28, "reference": 0.13, "headers": 0.12, "problems": 0.20}
SOURCES = {
    "docstrings": docstrings,
    "code": source_code,
    "reference": reference,
    "headers": headers,
}
TRAINING_SEED = 1
HELD_OUT_SEED = 2
TRAINING_PROBLEMS = 750
HELD_OUT_PROBLEMS = 20


def kind_documents(kind: str, *, held_out: bool) -> Iterator[Document]:
    """The training or the held-out documents of one kind, in an order that is the same
    everywhere."""
    if kind == "problems":
        seed, count = (
            (HELD_OUT_SEED, HELD_OUT_PROBLEMS) if held_out else (TRAINING_SEED, TRAINING_PROBLEMS)
        )
        return itertools.islice(word_problems(seed=seed), count)
    return SOURCES[kind](held_out=held_out)


def present_kinds() -> list[str]:
    """The kinds this machine has: the interpreter's C headers come with its development files
    only."""
    return [kind for kind in SHARES if next(kind_documents(kind, held_out=False), None)]

"""Reads the text that a data specification names and cuts it into token sequences.

A data specification is one of four: a path (a file or a folder; an existing path takes precedence);
`hf:name[:config[:split]]`; `builtin` (docstrings of the running Python's standard library); or
`builtin:held-out` (the part of them that the demo model was not trained on).
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from artifacts.common.untrusted import existing
from artifacts.errors import BadInput, BadUsage
from profilers.text import files as textfiles
from profilers.text import hub
from profilers.text import python as pythontext
from profilers.text.files import Document

__all__ = ["Document", "data_digest", "documents", "token_sequences"]

FORMS = (
    "a text, jsonl or parquet file, a folder of them, hf:name[:config[:split]], builtin or "
    "builtin:held-out"
)
# characters tokenised at a time: the first tokens of a file of gigabytes do not need all of it
PIECE = 1 << 20


def documents(spec: str, *, seed: int = 0) -> Iterator[Document]:
    """Yield the documents that `spec` names, blank ones excluded, always the same and in the same
    order.

    The seed sets the order of the built-in documents only; files and hub data keep theirs. Raises
    BadInput at once for a specification that names no data, and while iterating for text that
    cannot be read or when there is no text.
    """
    return not_blank(source(spec, seed=seed), spec)


def source(spec: str, *, seed: int) -> Iterator[Document]:
    if (path := existing(spec)) is not None:
        return textfiles.read(path)
    if spec.startswith("hf:"):
        return hub.read(spec)
    if spec in ("builtin", "builtin:held-out"):
        return pythontext.docstrings(held_out=spec == "builtin:held-out", seed=seed)
    raise BadInput(
        f"no data at {spec!r}: "
        f"{'patterns are not expanded, ' if set(spec) & set('*?[') else ''}give {FORMS}"
    )


def not_blank(texts: Iterable[Document], spec: str) -> Iterator[Document]:
    is_blank = True
    for document in texts:
        if document.text.strip():
            is_blank = False
            yield document
    if is_blank:
        raise BadInput(f"{spec} holds no text: give {FORMS} with text in it")


def token_sequences(
    documents: Iterable[Document], tokenizer, *, length: int, num_tokens: int
) -> Iterator[np.ndarray]:
    """Yield each document's tokens, without special ones, cut into int64 arrays [T], 2 <= T <=
    length.

    Stops after `num_tokens` tokens in all, which may shorten the last array. A remainder of one
    token is dropped: it predicts no other. Raises BadInput when no sequence remains.
    """
    if min(length, num_tokens) < 2:
        raise BadUsage(
            f"a sequence needs at least 2 tokens, not a length of {length} and {num_tokens} "
            "tokens in all"
        )
    num_left = num_tokens
    for sequence in all_sequences(documents, tokenizer, length):
        yield sequence[:num_left]
        num_left -= len(sequence)
        if num_left < 2:
            return
    if num_left == num_tokens:
        raise BadInput("the data has no document of two tokens or more: give more text")


def all_sequences(documents: Iterable[Document], tokenizer, length: int) -> Iterator[np.ndarray]:
    for document in documents:
        for piece in pieces(document.text):
            ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            cuts = (
                np.array(ids[start : start + length], dtype=np.int64)
                for start in range(0, len(ids), length)
            )
            yield from (cut for cut in cuts if len(cut) > 1)


def pieces(text: str) -> Iterator[str]:
    """Yield the text in parts of at most `PIECE` characters, cut at the end of a line where a part
    has one."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def data_digest(sequences: Iterable[np.ndarray]) -> str:
    """Return the sha256, in hexadecimal, of the token ids and of the sequences' lengths."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(np.array([len(sequence), *sequence], dtype="<i8").tobytes())
    return digest.hexdigest()

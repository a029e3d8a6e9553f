"""Upper bound on the length of a text, to be checked before it is encoded: a longer text cannot fit
into the positions of the model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

_KEEPS = (
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Prepend",
    "Lowercase",
    "NFD",
    "NFKD",
)  # remove no character
# A composed character is four code points at most when it is decomposed (Unicode Standard Annex
# 15).
_COMPOSES = ("NFC", "NFKC")
_PARTS = 4
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True, slots=True)
class TextBound:
    """A text of more than `num_characters` has more tokens than the model has positions; with
    `drops_spaces` a token may take any number of spaces, so that only the other characters
    count."""

    num_characters: int
    drops_spaces: bool

    def is_exceeded(self, text: str) -> bool:
        """Return whether the text cannot fit."""
        if len(text) <= self.num_characters:
            return False
        return not self.drops_spaces or len("".join(text.split())) > self.num_characters


def text_bound(tokenizer: PreTrainedTokenizerBase, num_positions: int) -> TextBound | None:
    """Return the bound of a tokenizer whose tokens each stand for a limited number of characters,
    those of its longest token. None for any other tokenizer: it may drop characters, or take any
    number of unknown ones for one token."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    try:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # tokenizers has no other for a step in Python
        return None
    steps = list(_steps(state["normalizer"])) + list(_steps(state["pre_tokenizer"]))
    vocabulary = tokenizer.get_vocab()
    if not (
        all(map(_keeps_text, steps)) and _knows_every_character(state["model"], steps, vocabulary)
    ):
        return None
    per_character = _PARTS if any(step["type"] in _COMPOSES for step in steps) else 1
    drops_spaces = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    return TextBound(max(map(len, vocabulary)) * per_character * num_positions, drops_spaces)


def _steps(step: dict | None) -> Iterator[dict]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _steps(inner)


def _keeps_text(step: dict) -> bool:
    """Return whether a step of the tokenizer leaves at least a quarter of the characters of any
    text."""
    match step["type"]:
        case "Split" | "Punctuation":
            return step["behavior"] != "Removed"
        case "Replace":
            return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + "x"))
        case kind:
            return kind in _KEEPS + _COMPOSES


def _knows_every_character(model: dict, steps: list[dict], vocabulary: dict[str, int]) -> bool:
    """Return whether no token stands for a run of unknown characters."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback") and vocabulary.keys() >= _BYTES:
        return True
    if any(step["type"] == "ByteLevel" for step in steps):
        return vocabulary.keys() >= set(ByteLevel.alphabet())
    return model["type"] == "BPE" and model["unk_token"] is not None and not model["fuse_unk"]

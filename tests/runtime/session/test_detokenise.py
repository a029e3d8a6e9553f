"""Text decoded token by token equals the text decoded at once, and ends at stop strings."""

import pytest
from transformers import AddedToken, AutoTokenizer

from moectl.bundled import demo_model
from runtime.session.generation.stream import Detokeniser, Stops

WORDS = "Return the numbér of — 漢字 🙂 bytes\n\n    x += 1  # ok"


@pytest.mark.parametrize("cut", [0, 1])
def test_the_pieces_add_up_to_the_text(cut: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    ids = tokenizer(WORDS).input_ids
    ids = ids[: len(ids) - cut]
    detokeniser = Detokeniser(tokenizer)
    pieces = [detokeniser.add(token_id) for token_id in ids]
    assert not any(piece.endswith("�") for piece in pieces) and "" in pieces
    assert "".join(pieces) + detokeniser.rest() == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_that_are_kept() -> None:
    """They are texts of their own, and the rest is decoded as without them."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    marks = ["<|call|>", "<|other|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    text = f"Return é{marks[0]}{WORDS}{marks[1]} the{marks[0]}{marks[0]}"
    detokeniser = Detokeniser(tokenizer, keeps=frozenset([marks[0], "no token"]))
    pieces = [detokeniser.add(token_id) for token_id in tokenizer(text).input_ids]
    assert "".join(pieces) + detokeniser.rest() == text.replace(marks[1], "")


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "is_met"),
    [
        (["one ", "two ", "three"], ("two",), "one ", True),
        (["one E", "N", "D two"], ("END",), "one ", True),
        (["one E", "N", "d two"], ("END",), "one ENd two", False),
        (["aab", "aab", "c"], ("aabc",), "aab", True),
        (["x\n", "\n"], ("\n\n", "zz"), "x", True),
        (["b then a"], ("a", "b"), "", True),
        (["plain"], (), "plain", False),
        (["ends with EN"], ("END",), "ends with EN", False),
    ],
)
def test_stops(pieces: list[str], stops: tuple[str, ...], expected: str, is_met: bool) -> None:
    text = ""
    passing = Stops(stops)
    for piece in pieces:
        text += passing.add(piece)
        if passing.is_met:
            break
    assert (text + passing.rest(), passing.is_met) == (expected, is_met)


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    stops = Stops(("END",))
    assert [stops.add(piece) for piece in ("a", "E", "N", "x", "EN")] == ["a", "", "", "ENx", ""]

"""Text that comes token by token is the whole text, and ends where it is told to."""

import pytest
from transformers import AutoTokenizer

from moectl.bundled import demo_model
from runtime.session.detokenise import Detokeniser, Stops

WORDS = "Return the numbér of — 漢字 🙂 bytes\n\n    x += 1  # ok"


@pytest.mark.parametrize("cut", [0, 1])
def test_what_is_told_is_the_text(cut: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    ids = tokenizer(WORDS).input_ids
    ids = ids[: len(ids) - cut]
    text = Detokeniser(tokenizer)
    told = [text.add(token_id) for token_id in ids]
    assert not any(piece.endswith("�") for piece in told) and "" in told
    assert "".join(told) + text.rest() == tokenizer.decode(ids, skip_special_tokens=True)


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
    text, passing = "", Stops(stops)
    for piece in pieces:
        text += passing.add(piece)
        if passing.is_met:
            break
    assert (text + passing.rest(), passing.is_met) == (expected, is_met)


def test_nothing_is_told_that_may_be_a_stop() -> None:
    stops = Stops(("END",))
    assert [stops.add(piece) for piece in ("a", "E", "N", "x", "EN")] == ["a", "", "", "ENx", ""]

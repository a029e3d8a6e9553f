"""A user's text as tokens: how much of it is read, and what a checkpoint without a tokenizer is
told."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from artifacts.errors import BadInput
from moectl.shared.text import read_data, read_text


def tokenizer(text: str, **options: bool) -> dict[str, list[int]]:
    """One token for each word."""
    return {"input_ids": list(range(len(text.split())))}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file of 12 words."""
    path = tmp_path / "text.txt"
    path.write_text("a b c d e f g h i j k l")
    return str(path)


def test_sequences_end_at_the_first_limit(text: str) -> None:
    opened = SimpleNamespace(tokenizer=tokenizer)
    data = read_data(opened, text, length=5, num_tokens=100, seed=3)
    assert [len(sequence) for sequence in data.sequences] == [5, 5, 2] and (
        data.spec,
        data.seed,
    ) == (text, 3)
    assert [
        len(one) for one in read_data(opened, text, length=5, num_tokens=7, seed=0).sequences
    ] == [5, 2]
    assert [
        len(one)
        for one in read_data(opened, text, length=5, num_tokens=100, seed=0, at_most=1).sequences
    ] == [5]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_tokens": 100}, "12 of the 100 tokens that were asked for: "),
        ({"num_tokens": 5 * 9, "at_most": 9}, "3 of the 9 sequences that were asked for: "),
        ({"num_tokens": 13}, ""),  # one token more would make no sequence
        ({"num_tokens": 15, "at_most": 3}, ""),
        ({"num_tokens": 7}, ""),
    ],
)
def test_less_text_than_was_asked_for_is_said(text: str, asked: dict[str, int], said: str) -> None:
    shortfall = read_data(
        SimpleNamespace(tokenizer=tokenizer), text, length=5, seed=0, **asked
    ).shortfall
    assert shortfall.startswith(said) and bool(shortfall) == bool(said)


def test_texts_are_equally_long(text: str) -> None:
    read = read_text(SimpleNamespace(tokenizer=tokenizer), text, length=8, num_tokens=16, seed=0)
    assert [len(sequence) for sequence in read.sequences] == [8] and read.prefill == 4


@pytest.mark.parametrize("read", [read_data, read_text])
def test_a_checkpoint_without_a_tokenizer(read, text: str) -> None:
    with pytest.raises(BadInput, match="no tokenizer: put tokenizer.json beside it"):
        read(SimpleNamespace(tokenizer=None), text, length=5, num_tokens=10, seed=0)

"""Drafts by the longest earlier place that ends as the text does now."""

import time

import numpy as np
import pytest

from artifacts.errors import BadUsage
from runtime.drafters.ngram import Ngram


def proposed(text: list[int], most: int = 4, **options: int) -> list[int]:
    return list(Ngram(**options).begin([], None).propose(text, most))


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], [3, 9, 1, 2]),  # longer, though older
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # equally long: the newer; repeats itself
        ([7, 7, 7], [7, 7, 7, 7]),
    ],
)
def test_drafts_follow_the_longest_and_newest_place(text: list[int], drafts: list[int]) -> None:
    assert proposed(text) == drafts


def test_an_index_that_grows_drafts_as_one_that_reads_all_at_once() -> None:
    text = np.random.default_rng(0).integers(0, 3, 200).tolist()
    grown = Ngram().begin([], None)
    for end in range(1, len(text)):
        drafts = grown.propose(text[:end], 5)
        assert drafts == proposed(text[:end], 5)
        longest, place = max(
            (
                (
                    next(
                        n
                        for n in range(17)
                        if n in (16, at) or text[at - n - 1] != text[end - n - 1]
                    ),
                    at,
                )
                for at in range(1, end)
            ),
            default=(0, 0),
        )
        if end - place <= 60:  # within the places that are compared
            assert drafts[:1] == ([text[place]] if longest >= 2 else [])


def test_a_token_costs_little_in_a_long_text() -> None:
    text = np.random.default_rng(0).integers(0, 40, 100_000).tolist()
    drafter = Ngram().begin([], None)
    drafter.propose(text, 4)
    begin_s = time.process_time()
    for token in range(1000):
        text.append(token % 40)
        drafter.propose(text, 4)
    assert (time.process_time() - begin_s) / 1000 < 1e-3


def test_lengths_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadUsage, match="1 <= least <= most"):
        Ngram(least=3, most=2)

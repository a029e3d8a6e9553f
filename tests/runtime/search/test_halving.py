"""Successive halving on numbers whose best is known."""

from collections.abc import Callable

import numpy as np
import pytest

from artifacts.errors import BadInput
from runtime.search.halving import Trials, climb, halve, one_by_one, rungs


def scores(seed: int, *, noise: float) -> Callable[[int, int], float]:
    """Candidate n is worth n; a result on a short amount has an error, on the last amount none."""
    errors = np.random.default_rng(seed).normal(0, noise, (100, 4))
    return lambda candidate, amount: (
        candidate + (0 if amount == 27 else errors[candidate, amount % 4])
    )


def test_rungs_end_with_all_and_never_look_at_too_little() -> None:
    assert rungs(900, least=100) == [100, 300, 900]
    assert rungs(900, least=101) == [300, 900]
    assert rungs(5, least=100) == [5]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_survives_errors_that_are_smaller_than_its_lead(seed: int) -> None:
    trials = Trials(one_by_one(scores(seed, noise=8.0)), lambda score: (score,))
    found = halve(
        trials, list(np.random.default_rng(seed).permutation(81).tolist()), [3, 9, 27], keep=4
    )
    assert found[0] < 5 and found == sorted(found)
    assert len(trials.results) == 81 + 27 + 9


def test_when_it_is_late_so_many_are_tried_as_must_be() -> None:
    looks = iter((False, True, True, True, True))
    late = Trials(
        one_by_one(lambda candidate, amount: candidate),
        lambda score: (score,),
        lambda: next(looks),
        1,
    )
    assert late.best([5, 3, 4, 2], 1, least=1) == [3, 5] and late.num_untried == 2
    assert late.best([3, 9], 1) == [3], "known ones are not asked again"
    assert halve(late, [7, 6, 8], [2, 4], keep=2) == [6, 7]


def test_with_one_round_it_is_exhaustive() -> None:
    trials = Trials(
        one_by_one(lambda candidate, amount: (candidate * 7) % 13), lambda score: (score,)
    )
    assert halve(trials, range(13), [1], keep=1) == sorted(range(13), key=lambda one: one * 7 % 13)


def test_what_cannot_be_tried_is_left_out_with_its_reason_and_not_tried_again() -> None:
    asked = []

    def evaluate(candidate: int, amount: int) -> float:
        asked.append(candidate)
        if candidate % 2:
            raise BadInput(f"{candidate} is odd")
        return candidate

    trials = Trials(one_by_one(evaluate), lambda score: (score,))
    assert halve(trials, [3, 2, 1, 0], [1, 3], keep=4) == [0, 2]
    assert trials.refused == {3: "3 is odd", 1: "1 is odd"} and asked.count(3) == 1


def test_climbing_reaches_the_best_by_steps_and_stops_there() -> None:
    trials = Trials(
        one_by_one(lambda candidate, amount: abs(candidate - 40)), lambda score: (score,)
    )
    assert climb(trials, 37, lambda one: [one - 1, one + 1], [1, 3], most=100) == 40
    assert climb(trials, 37, lambda one: [one - 1, one + 1], [1, 3], most=2) == 38

"""Bits per expert: the prefix split against all possible splits, and the guarantees of the greedy
choice."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadInput, BadUsage
from artifacts.quantisation.bit_allocation import greedy_columns, prefix_split


def losses(seed: int, num_experts: int, *, is_falling: bool = True) -> np.ndarray:
    table = np.random.default_rng(seed).random((num_experts, 4))
    return -np.sort(-table, axis=1) if is_falling else table


def brute_force(loss: np.ndarray, avg_bits: float) -> tuple[float, list[int]]:
    """The minimal summed loss of all prefix splits that spend the bits exactly, and its bits."""
    num_experts = len(loss)
    best = (math.inf, [])
    budget = math.floor(num_experts * (avg_bits - 1))
    for bits in itertools.combinations_with_replacement((4, 3, 2, 1), num_experts):
        if sum(bits) - num_experts == budget:
            total = sum(loss[expert, width - 1] for expert, width in enumerate(bits))
            best = min(best, (total, list(bits)))
    return best


@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(1, 4), st.booleans())
@settings(max_examples=200)
def test_prefix_split_is_the_best_of_all_splits(
    seed: int, num_experts: int, avg_bits: float, is_falling: bool
) -> None:
    loss = losses(seed, num_experts, is_falling=is_falling)
    assert prefix_split(loss, avg_bits) == brute_force(loss, avg_bits)[1]


def test_whole_averages_and_ties() -> None:
    assert prefix_split(losses(0, 5), 1) == [1] * 5 and prefix_split(losses(0, 5), 4) == [4] * 5
    assert prefix_split(np.zeros((6, 4)), 2) == [2] * 6
    assert prefix_split(np.zeros((0, 4)), 2) == []
    only_first = np.array([[9.0, 9, 9, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    assert prefix_split(only_first, 2) == [4, 1, 1]


def cheapest(cost: np.ndarray, nbytes: np.ndarray, budget: int) -> float:
    """The minimal cost of any choice within the budget."""
    choices = itertools.product(range(4), repeat=len(cost))
    fitting = (
        choice
        for choice in choices
        if sum(nbytes[row, level] for row, level in enumerate(choice)) <= budget
    )
    return min(sum(cost[row, level] for row, level in enumerate(choice)) for choice in fitting)


@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.floats(0, 1))
@settings(max_examples=200)
def test_greedy_is_within_one_step_of_the_best_choice(
    seed: int, num_rows: int, is_falling: bool, share: float
) -> None:
    """It keeps the budget, is never worse than one width for all replicas, and at most one step
    worse than the optimum."""
    random = np.random.default_rng(seed)
    cost = losses(seed, num_rows, is_falling=is_falling)
    nbytes = np.cumsum(random.integers(1, 6, (num_rows, 4)), axis=1)
    least = nbytes[:, 0].sum()
    most = nbytes[:, -1].sum()
    budget = int(least + share * (most - least))
    level = greedy_columns(cost, nbytes, budget)
    rows = np.arange(num_rows)
    total = cost[rows, level].sum()
    assert nbytes[rows, level].sum() <= budget
    assert all(
        total <= cost[:, width].sum() for width in range(4) if nbytes[:, width].sum() <= budget
    )
    assert total <= cheapest(cost, nbytes, budget) + (cost.max(1) - cost.min(1)).max() + 1e-12


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=50)
def test_greedy_is_the_best_choice_wherever_it_spends_all(seed: int, num_rows: int) -> None:
    """With every width on the hull, no other choice of as many bytes costs less."""
    gains = -np.sort(-np.random.default_rng(seed).random((num_rows, 3)), axis=1)
    cost = gains.sum(1, keepdims=True) - np.cumsum(np.pad(gains, ((0, 0), (1, 0))), axis=1)
    nbytes = np.tile([1, 2, 3, 4], (num_rows, 1))
    for budget in range(num_rows, 4 * num_rows + 1):
        level = greedy_columns(cost, [1, 2, 3, 4], budget)
        assert cost[np.arange(num_rows), level].sum() == pytest.approx(
            cheapest(cost, nbytes, budget)
        )


def test_a_step_jumps_over_a_width_that_is_not_worth_it() -> None:
    cost = np.array([[10.0, 9.9, 1.0, 0.9], [10.0, 5.0, 4.0, 3.0]])
    assert greedy_columns(cost, [10, 20, 30, 40], 50).tolist() == [2, 1]
    assert greedy_columns(cost, [10, 20, 30, 40], 30).tolist() == [0, 1]


def test_of_equal_steps_the_lower_row_takes_all_of_its_own_first() -> None:
    same = np.tile([3.0, 2.0, 1.0, 0.0], (3, 1))
    found = [greedy_columns(same, [1, 2, 3, 4], 3 + more).tolist() for more in range(5)]
    assert found == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [3, 1, 0]]


def test_any_number_of_widths_can_be_chosen_from() -> None:
    """Eight bits cost four times what the step before did, and are bought last."""
    cost = np.array([[8.0, 4.0, 2.0, 1.0, 0.0], [4.0, 2.0, 1.0, 0.5, 0.0]])
    nbytes = [1, 2, 3, 4, 8]
    assert [greedy_columns(cost, nbytes, budget).tolist() for budget in (8, 12, 16)] == [
        [3, 3],
        [4, 3],
        [4, 4],
    ]
    assert greedy_columns(cost[:, 3:], nbytes[3:], 12).tolist() == [1, 0]


def test_more_bits_that_save_nothing_are_not_bought() -> None:
    assert greedy_columns(
        np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 0.5, 0.6]]), [1, 2, 3, 4], 100
    ).tolist() == [0, 1]
    assert greedy_columns(np.zeros((0, 4)), [1, 2, 3, 4], 0).tolist() == []


def test_what_cannot_be_asked_for() -> None:
    for avg_bits in (0.99, 4.01):
        with pytest.raises(BadUsage, match=f"average bits {avg_bits}"):
            prefix_split(losses(0, 4), avg_bits)
    with pytest.raises(BadUsage, match="take 4 bytes, above the budget of 3"):
        greedy_columns(losses(0, 4), [1, 2, 3, 4], 3)
    gaps = np.full((2, 4), np.nan)
    for choose in (lambda: prefix_split(gaps, 2), lambda: greedy_columns(gaps, [1, 2, 3, 4], 9)):
        with pytest.raises(BadInput, match="gaps"):
            choose()


def test_one_width_leaves_no_choice() -> None:
    assert greedy_columns(np.ones((3, 1)), [5], 15).tolist() == [0, 0, 0]

"""The compiled loops of MoEpic's solver against slow ones: each by itself, since a later one mends what one before it
did badly."""

import numpy as np
import pytest

from artifacts.splits import _Problem
from tests.artifacts.split_reference import Plain
from tests.artifacts.test_splits import named, problem


def case(seed: int) -> tuple[Plain, _Problem, np.ndarray, float]:
    """A problem for both, equal budgets, and a step."""
    random = np.random.default_rng(seed)
    layers, experts = random.integers(1, 5), random.integers(2, 5)
    besides = [(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 0.3), (0.2, 0.1)][seed % 5]
    window, *times, k, hit, prediction, cached = problem(
        layers, experts, random.integers(1, 3), seed, compute=random.choice([0.1, 0.5, 1.0, 2.0, 4.0])
    )
    plain = Plain(window, *times, k, hit, prediction, cached, **named(besides))
    ours = _Problem.of(window, (*times, k, *besides), hit, prediction, cached)
    return plain, ours, ours.even(random.uniform(0.15, 1) * layers * experts), random.choice([0.2, 0.25, 0.5, 1.0])


@pytest.mark.parametrize("seed", range(60))
def test_greedy_and_refined_are_the_slow_ones(seed: int) -> None:
    plain, ours, budgets, zeta = case(seed)
    np.testing.assert_allclose(ours.greedy(budgets, zeta)[0], plain.greedy(budgets, zeta), atol=1e-9)
    found, expected = ours._solved("refine", budgets, zeta)[0], plain.refined(budgets, zeta)
    assert found.sum() == pytest.approx(budgets.sum())
    # Of moves that are worth the same either may be taken, as rounding has it.
    assert sum(plain.split(found)[0]) == pytest.approx(sum(plain.split(expected)[0]), abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_table_of_budgets_and_windows_and_the_cells_chosen_from_it(seed: int) -> None:
    from artifacts.split_kernels import best_cells, tabulate

    plain, ours, budgets, _ = case(seed)
    num_experts = ours.shape[1]
    values, windows = np.arange(1, 2 * num_experts + 1) / 2, np.append(np.linspace(0, 3, 7), 1e9)
    table = tabulate(ours.curves, ours.times, values, windows)
    for layer, by_budget in enumerate(table):
        expected = [[plain.covered(layer, budget, window)[1] for window in windows] for budget in values]
        np.testing.assert_array_equal(by_budget, expected)
    spare = int(budgets.sum() * 2) - len(budgets)
    if spare >= 0:
        cells = best_cells(ours.times, table, windows, ours.first_window, spare)
        assert cells.tolist() == plain.cells(table, windows, spare)

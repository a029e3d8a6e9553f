"""The compiled loops of MoEpic's solver against slow ones: each by itself, since a later one mends what one before it
did badly."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.splits import _Problem
from tests.artifacts.split_reference import Plain
from tests.artifacts.test_splits import BESIDES, named, problem

ZETAS = st.sampled_from([0.2, 0.25, 0.5, 1.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plain, _Problem, np.ndarray, float]:
    """A problem for both, equal budgets of 0.15 experts to all, and a step."""
    layers, experts, seed = draw(st.integers(1, 4)), draw(st.integers(2, 4)), draw(st.integers(0, 999))
    k, besides = draw(st.integers(1, min(2, experts))), draw(BESIDES)
    window, *times, k, hit, prediction, cached = problem(layers, experts, k, seed, compute=draw(st.floats(0.1, 4)))
    plain = Plain(window, *times, k, hit, prediction, cached, **named(besides))
    ours = _Problem.of(window, (*times, k, *besides), hit, prediction, cached)
    return plain, ours, ours.even(draw(st.floats(0.15, 1)) * layers * experts), draw(ZETAS)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_greedy_and_refined_are_the_slow_ones(case: tuple[Plain, _Problem, np.ndarray, float]) -> None:
    plain, ours, budgets, zeta = case
    for found, expected in (
        (ours.greedy(budgets, zeta)[0], plain.greedy(budgets, zeta)),
        (ours._solved("refine", budgets, zeta)[0], plain.refined(budgets, zeta)),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-9)


@given(cases())
@settings(max_examples=30, deadline=None)
def test_the_table_of_budgets_and_windows_and_the_cells_chosen_from_it(
    case: tuple[Plain, _Problem, np.ndarray, float],
) -> None:
    from artifacts.split_kernels import best_cells, tabulate

    plain, ours, budgets, _ = case
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

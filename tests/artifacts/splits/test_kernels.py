"""The stages of MoEpic's solver against slow ones, each by itself, since a later stage hides the
errors of an earlier one."""

import itertools

import numpy as np
import pytest

from artifacts.splits.solve import SplitProblem, allocate
from tests.artifacts.splits.reference import Plain
from tests.artifacts.splits.test_solve import named, problem


def case(seed: int) -> tuple[Plain, SplitProblem, np.ndarray, float]:
    """A problem for both solvers, equal budgets (whole steps half of the time), and a step."""
    random = np.random.default_rng(seed)
    layers, experts, k = (int(random.integers(*ends)) for ends in ((1, 5), (2, 5), (1, 3)))
    besides = [(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 0.3), (0.2, 0.1)][seed % 5]
    compute, load_s, step = (
        float(random.choice(some)) for some in ([0.1, 0.5, 1, 4], [0.5, 1, 2], [0.2, 0.25, 0.5, 1])
    )
    window, moe_s, attention_s, _, k, *curves = problem(layers, experts, k, seed, compute=compute)
    plain = Plain(window, moe_s, attention_s, load_s, k, *curves, **named(besides))
    ours = SplitProblem.of(window, (moe_s, attention_s, load_s, k, *besides), curves)
    budget = random.uniform(0.15, 1) * experts
    return (
        plain,
        ours,
        ours.even(layers * (max(1, round(budget / step)) * step if seed % 2 else budget)),
        step,
    )


@pytest.mark.parametrize("seed", range(60))
def test_greedy_and_refined_are_the_slow_ones(seed: int) -> None:
    plain, ours, even, zeta = case(seed)
    greedy = ours.greedy(even, zeta)
    refined = ours.run_kernel("refine", even, zeta)
    for answer in (
        greedy,
        refined,
    ):  # a layer's exposed time is reused where nothing before it changed
        np.testing.assert_array_equal(answer, ours.answer(answer[0]))
    np.testing.assert_allclose(greedy[0], plain.greedy(even, zeta), atol=1e-9)
    once = refined[0]
    assert once.sum() == pytest.approx(even.sum())
    # Between equal moves rounding decides.
    assert plain.exposed_s(once) == pytest.approx(
        plain.exposed_s(plain.refined(even, zeta)), abs=1e-9
    )
    budgets = even
    for step in [zeta * 2**doublings for doublings in (2, 1, 0) if 2**doublings <= 1 / zeta]:
        budgets = plain.refined(budgets, step)
    assert plain.exposed_s(ours.refined(even, zeta)[0]) == pytest.approx(
        plain.exposed_s(budgets), abs=1e-9
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_change_is_the_difference_of_the_sums(seed: int) -> None:
    """For any two layers, or for one."""
    from artifacts.splits.kernels import exposed_change, split

    plain, ours, even, step = case(seed)
    windows = np.full(len(even) + 1, ours.first_window)
    exposed = np.zeros(len(even))
    split(ours.curves, ours.times, even, windows, exposed, np.zeros(len(even), np.int64))
    for one, other in itertools.product(range(len(even)), repeat=2):
        after = even.copy()
        after[one] = min(even[one] + step, ours.shape[1])
        after[other] = max(even[other] - step, step / 2)
        changes = (one, after[one], other, after[other])
        change = exposed_change(ours.curves, ours.times, even, windows, exposed, *changes)
        assert change == pytest.approx(plain.change(even, after), abs=1e-9)


@pytest.mark.parametrize("time", [3, 5, 6])
def test_less_than_rounding_of_what_takes_time_is_no_gain(time: int) -> None:
    """Only loads, only the link's latencies or only the host's work take a second. The third expert
    of the first layer gains a quarter of it and a little more; the second layer loses a quarter."""
    for little, moved in ((1e-13, 0), (1e-11, 1)):
        hit = np.array([[0, 0.3, 0.6, 0.85 + little], [0, 0.35, 0.6, 0.6]])
        times = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
        times[time] = 1.0
        ours = SplitProblem.of(times[0], times[1:], (hit, np.zeros((2, 0)), np.zeros((2, 0, 4))))
        for answer in (
            ours.greedy(ours.even(4), 1.0),
            ours.run_kernel("refine", ours.even(4), 1.0),
        ):
            assert answer[0].tolist() == [2 + moved, 2 - moved]


def test_where_nothing_takes_time_nothing_is_moved() -> None:
    ours = SplitProblem.of(0.0, (0.0, 0.0, 0.0, 1, 0.0, 0.0), problem(3, 4, 1, 0)[5:])
    for answer in (ours.greedy(ours.even(6), 0.5), ours.run_kernel("refine", ours.even(6), 0.5)):
        assert answer[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_the_table_of_budgets_and_windows_and_the_cells_chosen_from_it(seed: int) -> None:
    from artifacts.splits.kernels import best_cells, tabulate

    plain, ours, budgets, _ = case(seed)
    num_experts = ours.shape[1]
    values = np.arange(1, 2 * num_experts + 1) / 2
    windows = np.append(np.linspace(seed % 3, 3, 7), 1e9)
    if seed % 4 == 0:  # no predicted expert is cached, so loads end exactly with windows
        ours.curves[2][:] = plain.prediction_hit[:] = 0
    table = tabulate(ours.curves, ours.times, values, windows)
    for layer, by_budget in enumerate(table):
        expected = [
            [plain.covered(layer, budget, window)[1] for window in windows] for budget in values
        ]
        np.testing.assert_array_equal(by_budget, expected)
    spare = int(budgets.sum() * 2) - len(budgets)
    if spare >= 0:
        cells = best_cells(ours.times, table, windows, ours.first_window, spare)
        assert cells.tolist() == plain.cells(table, windows, spare)


@pytest.mark.parametrize("seed", range(12))
def test_cells_are_the_best_where_windows_do_not_depend_on_them(seed: int) -> None:
    """Experts take no time to compute, so a layer's window is its attention. What is left over goes
    where it is best."""
    random = np.random.default_rng(seed)
    window, _, attention_s, load_s, k, *curves = problem(3, 3, 1, seed)
    ours = SplitProblem.of(window, (0.0, attention_s, load_s, k, 0.0, 0.0), curves)
    num_cells = int(random.integers(3, 16))
    rest = float(random.choice([0.0, 0.3]))
    even = ours.even((num_cells + rest) / 2)
    budgets = ours.gridded(even, 0.5)
    assert budgets.sum() == pytest.approx(even.sum())
    ways = [
        np.array(way) / 2
        for way in itertools.product(range(1, 7), repeat=3)
        if sum(way) == num_cells
    ]
    best = min(ways, key=lambda way: ours.answer(way)[1].sum())
    whole = [best + one for one in np.eye(3) * rest / 2 if (best + one <= 3).all()]
    assert ours.answer(budgets)[1].sum() == pytest.approx(
        min(ours.answer(one)[1].sum() for one in whole)
    )


def test_less_than_a_cell_each_is_shared_evenly() -> None:
    ours = SplitProblem.of(0.5, (0.5, 0.5, 1.0, 1, 0.0, 0.0), problem(3, 3, 1, 0)[5:])
    for total, is_even in ((1.4, True), (1.5, True), (1.7, False), (2.0, False)):
        budgets = ours.gridded(ours.even(total), 0.5)
        assert (np.ptp(budgets) == 0) == is_even and budgets.sum() == pytest.approx(total)


def test_cells_are_an_expert_or_parts_of_it_and_not_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cells are no finer than a step or the permitted number; for a step beyond an expert they are
    whole experts."""
    ours = SplitProblem.of(0.5, (0.5, 0.5, 1.0, 1, 0.0, 0.0), problem(3, 4, 1, 4)[5:])
    for step, most, share in (
        (0.5, 2048, 2),
        (1.0, 2048, 1),
        (3.0, 2048, 1),
        (0.5, 12, 2),
        (0.1, 6, 1),
        (0.1, 5, 1),
    ):
        monkeypatch.setattr("artifacts.splits.solve._NUM_CELLS", most)
        cells = ours.gridded(ours.even(6.0), step) * share
        assert cells.tolist() == cells.round().tolist() and cells.sum() == 6 * share
        assert share == 1 or (cells % 2).any()


def test_windows_are_from_the_least_to_the_most_that_a_layer_leaves() -> None:
    curves = problem(2, 3, 2, 0)[5:]
    for times, first_window, least, most in (
        # Experts compute for 2 s, and one of 2 loads in 1.5 s: 1.5 x 2 / (1.5 + 2 / 2) s are
        # hidden, .8 s are left.
        ((2.0, 0.25, 1.5, 2), 0.3, 0.3, 2.25),
        ((2.0, 0.25, 1.5, 2), 1.1, 1.05, 2.25),
        ((2.0, 0.25, 1.5, 2, 0.1), 1.1, 0.25, 2.25),  # with a latency all computing may be hidden
        ((2.0, 0.25, 1.5, 2, 0.0, 0.1), 2.5, 1.05, 2.5),
        ((0.0, 0.25, 1.5, 2), 0.3, 0.25, 0.3),
    ):
        windows = SplitProblem.of(first_window, (*times, 0.0, 0.0)[:6], curves).window_grid()
        assert (windows[0], windows[-1]) == pytest.approx((least, most)) and first_window in windows
        assert (np.diff(windows) > 0).all() and len(windows) >= 256


@pytest.mark.parametrize("seed", range(8))
def test_the_answer_is_the_best_of_what_the_stages_find(seed: int) -> None:
    plain, ours, even, zeta = case(seed)
    arguments = (even.sum(), zeta, *plain.arguments)
    besides = {"latency_s": plain.latency_s, "host_s": plain.host_s}
    greedy = ours.greedy(even, zeta * even.sum())
    for one, other in zip(allocate(*arguments, **besides), greedy, strict=True):
        np.testing.assert_array_equal(one, other)
    refined = [ours.refined(start, 0.01) for start in (ours.gridded(even, 0.01), greedy[0])]
    best = min(greedy[1].sum(), *(answer[1].sum() for answer in refined))
    assert allocate(*arguments, solver="dynamic", **besides)[1].sum() == best

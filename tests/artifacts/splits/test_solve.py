"""MoEpic's solver: against plain loops and brute force, and invariants for any curves."""

import itertools
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.splits.solve import (
    SOLVERS,
    Latencies,
    SolvedSplit,
    SplitProblem,
    allocate,
    expert_split,
)
from tests.artifacts.splits.reference import Plain


def problem(num_layers: int, num_experts: int, k: int, seed: int, *, compute: float = 1.0) -> tuple:
    """Random curves and latencies, in the order of the arguments."""
    random = np.random.default_rng(seed)
    rising = np.sort(random.random((num_layers, num_experts - 1)), axis=1)
    hit = np.concatenate([np.zeros((num_layers, 1)), rising, np.ones((num_layers, 1))], axis=1)
    prediction = np.sort(random.random((num_layers, num_experts)), axis=1)[:, ::-1]
    cached = hit[:, None, :] * random.uniform(0.5, 1, (num_layers, num_experts, 1))
    moe_s, attention_s, head_s = random.uniform(0.1, 1, 3) * compute
    return head_s + attention_s, moe_s, attention_s, 1.0, k, hit, prediction, cached


def best_of_all(
    total: int, num_parts: int, arguments: tuple, besides: tuple[float, float]
) -> float:
    """The minimal summed exposed time over all budgets that are whole parts of an expert."""
    num_layers, num_experts = arguments[6].shape
    sums = []
    for head in itertools.product(range(1, num_experts * num_parts + 1), repeat=num_layers - 1):
        last = total * num_parts - sum(head)
        if 0 < last <= num_experts * num_parts:
            budgets = np.array([*head, last]) / num_parts
            sums.append(expert_split(budgets, *arguments, **named(besides))[0].sum())
    return min(sums)


BESIDES = st.sampled_from([(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 0.3), (0.2, 0.1)])


def named(besides: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("latency_s", "host_s"), besides, strict=True))


def as_problem(arguments: tuple, besides: tuple[float, float] = (0.0, 0.0)) -> SplitProblem:
    """The problem that `expert_split` makes of its arguments and of the overheads of each
    transfer."""
    first_window, *times = arguments[:5]
    return SplitProblem.of(first_window, (*times, *besides), arguments[5:])


@given(
    st.integers(1, 5),
    st.integers(2, 9),
    st.integers(0, 999),
    st.floats(0.05, 1),
    st.floats(0.1, 4),
    BESIDES,
)
def test_expert_split_is_the_plain_loops(
    layers: int, experts: int, seed: int, share: float, compute: float, besides: tuple[float, float]
) -> None:
    arguments = problem(layers, experts, min(2, experts), seed, compute=compute)
    budgets = np.random.default_rng(seed).uniform(share / 2, share, layers) * experts
    plain_ones = Plain(*arguments, **named(besides)).split(budgets)[:3]
    for ours, plain in zip(
        expert_split(budgets, *arguments, **named(besides)), plain_ones, strict=True
    ):
        np.testing.assert_array_equal(ours, plain)


@given(st.integers(0, 5), st.integers(0, 99))
@settings(max_examples=20)
def test_predictions_may_stop_early(num_ranks: int, seed: int) -> None:
    *times, hit, prediction, cached = problem(3, 6, 2, seed)
    arguments = (*times, hit, prediction[:, :num_ranks], cached[:, :num_ranks])
    budgets = [1.5, 2.0, 3.2]
    for ours, plain in zip(
        expert_split(budgets, *arguments), Plain(*arguments).split(budgets)[:3], strict=True
    ):
        np.testing.assert_array_equal(ours, plain)
    for solver in SOLVERS:
        assert allocate(6, 0.05, *arguments, solver=solver)[0].sum() == pytest.approx(6)


def test_expert_split_by_hand() -> None:
    """One layer, two experts, k = 1, half an expert of budget: theta is .5 for one cached expert,
    .25 for two."""
    curves = [[0.0, 0.5, 1.0]], [[0.6, 0.4]], [[[0.0, 0.5, 0.8], [0.0, 0.5, 1.0]]]
    # A load takes 4 and none fits the window of .8: both sizes have .25 in time, and the smaller is
    # taken.
    exposed, theta, size = expert_split([0.5], 0.8, 0.1, 0.2, 4.0, 1, *curves)
    assert (theta.tolist(), size.tolist()) == ([0.5], [1])
    np.testing.assert_allclose(exposed, 0.75 * 4 - 0.25 * 0.1)
    # One prediction fits: .25 + .75 * .6 of an expert with one cached, .25 + .8 * .6 with two.
    exposed, theta, size = expert_split([0.5], 0.8, 0.1, 0.2, 1.0, 1, *curves)
    assert (theta.tolist(), size.tolist()) == ([0.25], [2])
    np.testing.assert_allclose(exposed, 0.27 - 0.73 * 0.1)
    # A load that ends exactly with the window is in time: nothing is cached, one of two is loaded.
    arguments = (1.0, 0.1, 0.2, 1.0, 1, [[0.0, 0.0, 0.0]], [[0.75, 0.25]], np.zeros((1, 2, 3)))
    for exposed in (expert_split([2], *arguments)[0], as_problem(arguments).exposed_with([2], [2])):
        np.testing.assert_allclose(exposed, 0.25 - 0.75 * 0.1)


@given(
    st.integers(1, 4),
    st.integers(3, 8),
    st.integers(0, 99),
    st.floats(0.1, 0.9),
    BESIDES,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.booleans(),
)
@settings(max_examples=40)
def test_sizes_that_were_found_expose_what_was_said(
    layers: int,
    experts: int,
    seed: int,
    share: float,
    besides: tuple[float, float],
    load_s: float,
    is_whole: bool,
) -> None:
    window, moe_s, attention_s, _, *others = problem(layers, experts, 2, seed)
    arguments = (window, moe_s, attention_s, load_s, *others)
    budgets = np.full(layers, max(1, round(share * experts)) if is_whole else share * experts)
    exposed, _, sizes = expert_split(budgets, *arguments, **named(besides))
    np.testing.assert_allclose(
        as_problem(arguments, besides).exposed_with(budgets, sizes), exposed, atol=1e-9
    )


def test_each_transfer_has_its_latency() -> None:
    """One layer, two experts, k = 1, one expert of budget: one whole expert, or both cut in half.
    The bytes of one take 4, nothing fits the window."""
    curves = [[0.0, 0.5, 1.0]], np.zeros((1, 0)), np.zeros((1, 0, 3))
    for latency_s, size, exposed_s in (
        (0.0, 1, 0.5 * 4),  # both have half of it in time, and the smaller is taken
        (
            0.5,
            1,
            0.5 * (4 + 0.5),
        ),  # whole, an expert is loaded half of the time; cut, a bottom always
        (4.0, 1, 0.5 * (4 + 4)),
    ):
        exposed, theta, sizes = expert_split(
            [1], 0.0, 0.0, 0.0, 4.0, 1, *curves, latency_s=latency_s
        )
        assert (exposed.tolist(), theta.tolist(), sizes.tolist()) == (
            [exposed_s],
            [1 / size],
            [size],
        )
    hits_more = [[0.0, 0.1, 1.0]], np.zeros((1, 0)), np.zeros((1, 0, 3))
    for latency_s, size, exposed_s in ((1.0, 2, 0.5 * 4 + 1), (17.0, 1, 0.9 * (4 + 17))):
        exposed, _, sizes = expert_split(
            [1], 0.0, 0.0, 0.0, 4.0, 1, *hits_more, latency_s=latency_s
        )
        assert sizes.tolist() == [size] and exposed[0] == pytest.approx(exposed_s)
    exposed, _, sizes = expert_split(
        [1], 0.0, 0.0, 0.0, 4.0, 1, *hits_more, latency_s=1.0, host_s=2.0
    )
    assert sizes.tolist() == [2] and exposed[0] == pytest.approx(0.5 * 4 + 1 + 2)
    flat = [[0.0, 0.5, 0.5]], *curves[1:]
    exposed, _, _ = expert_split([0.5], 0.0, 0.0, 0.0, 4.0, 1, *flat, latency_s=1.0)
    # two transfers of an absent expert, one of a bottom
    assert exposed[0] == pytest.approx(0.75 * 4 + 0.5 * 2 + 0.5 * 1)


@pytest.mark.parametrize("solver", SOLVERS)
@given(
    st.integers(1, 5),
    st.integers(2, 9),
    st.integers(0, 999),
    st.floats(0.02, 1.1),
    st.sampled_from([0.01, 0.1, 0.3]),
    BESIDES,
)
@settings(max_examples=50)
def test_what_holds_for_any_allocation(
    solver: str,
    layers: int,
    experts: int,
    seed: int,
    share: float,
    zeta: float,
    besides: tuple[float, float],
) -> None:
    arguments = problem(layers, experts, min(2, experts), seed)
    total = share * layers * experts
    budgets, exposed, theta, sizes = allocate(
        total, zeta, *arguments, solver=solver, **named(besides)
    )
    assert budgets.sum() == pytest.approx(min(total, layers * experts))
    assert ((budgets > 0) & (budgets <= experts + 1e-9)).all()
    assert ((theta > 0) & (theta <= 1)).all()
    assert ((sizes >= 1) & (sizes <= experts)).all()
    np.testing.assert_allclose(theta * sizes, budgets)
    even = np.full(layers, min(total / layers, experts))
    assert exposed.sum() <= expert_split(even, *arguments, **named(besides))[0].sum() + 1e-12
    again = expert_split(np.minimum(budgets, experts), *arguments, **named(besides))
    for ours, other in zip((exposed, theta, sizes), again, strict=True):
        np.testing.assert_allclose(ours, other)


@given(
    st.integers(2, 6),
    st.integers(2, 6),
    st.integers(0, 999),
    st.floats(0.1, 0.9),
    st.floats(0.2, 3),
)
@settings(max_examples=40)
def test_dynamic_is_never_worse_than_greedy(
    layers: int, experts: int, seed: int, share: float, compute: float
) -> None:
    arguments = problem(layers, experts, min(2, experts), seed, compute=compute)
    total = share * layers * experts
    greedy, dynamic = (
        allocate(total, 0.05, *arguments, solver=solver)[1].sum() for solver in SOLVERS
    )
    assert dynamic <= greedy


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("besides", [(0.0, 0.0), (0.2, 0.0), (0.1, 0.2)])
@pytest.mark.parametrize(("layers", "experts", "num_parts"), [(1, 4, 4), (2, 5, 4), (3, 4, 2)])
def test_dynamic_is_as_good_as_brute_force(
    layers: int, experts: int, num_parts: int, besides: tuple[float, float], seed: int
) -> None:
    """Over all budgets that are whole parts of an expert."""
    arguments = problem(layers, experts, 2, seed, compute=2)
    total = max(1, layers * experts // 3)
    ours = as_problem(arguments, besides)
    even = ours.even(total)
    dynamic = ours.dynamic(even, ours.greedy(even, 1 / num_parts), 1 / num_parts)[1].sum()
    assert dynamic <= best_of_all(total, num_parts, arguments, besides) + 1e-9


def test_greedy_moves_to_the_layer_that_gains() -> None:
    """Layer 0 never hits, layer 1 hits what it holds: it ends with nearly all of the budget, a
    hundredth of which is .03 experts."""
    hit = np.array([np.zeros(5), np.linspace(0, 1, 5)])
    arguments = (0.0, 0.0, 0.0, 1.0, 1, hit, np.zeros((2, 4)), np.zeros((2, 4, 5)))
    budgets, exposed, _, _ = allocate(3, 0.01, *arguments)
    np.testing.assert_allclose(budgets, [0.03, 2.97])
    np.testing.assert_allclose(exposed.sum(), 2 - budgets[1] / 4)


def test_greedy_takes_the_gain_first_and_then_the_least_loss_of_the_others() -> None:
    """By a step of one expert layer 0 gains .3 or loses .1, layer 1 gains .25 or loses .2: the best
    pair together would be 1 from 0, but 0 gains most."""
    hit = np.array([[0, 0.5, 0.6, 0.9, 0.9], [0, 0.4, 0.6, 0.85, 0.85]])
    nothing = np.zeros((2, 0)), np.zeros((2, 0, 5))
    ours = SplitProblem.of(0.0, (0.0, 0.0, 1.0, 1, 0.0, 0.0), (hit, *nothing))
    assert ours.greedy(ours.even(4), 1.0)[0].tolist() == [3, 1]


def test_a_step_that_no_layer_can_give_moves_nothing() -> None:
    """As MoEpic's zeta of .05 on Mixtral: 4.8 experts, of 3 a layer. Half of the layers gain by a
    fourth expert, the others hit no more with three than with one."""
    hit = np.tile([[0, 0.1, 0.2, 0.3, 0.9, 0.9, 0.9, 0.9, 1], [0, *[0.5] * 7, 1]], (16, 1))
    arguments = 0.0, 0.0, 0.0, 1.0, 1, hit, np.zeros((32, 0)), np.zeros((32, 0, 9))
    assert np.ptp(allocate(96, 0.05, *arguments)[0]) == 0
    assert np.ptp(allocate(96, 0.01, *arguments)[0]) >= 2 * 0.96 - 1e-9


def uneven(budget: int) -> tuple[SplitProblem, np.ndarray]:
    """24 layers of 60 experts as uneven as MoEpic's text says (sections 2.2, 2.3): LCP's hit rates
    of Table 1, bent so that half of the experts hit 58.12 to 63.67 %; 2.07 to 3.39 of 4 predictions
    right, least at both ends. Loads and layers take what the text says (165 and 57 ms a token),
    half of a layer its experts. And equal budgets."""
    sizes = np.arange(0, 61, 10)
    table = np.array([0, 0.2556, 0.4536, 0.6221, 0.7712, 0.9008, 1])
    bends = np.log(np.linspace(0.5812, 0.6367, 24)) / np.log(0.6221)
    hit = (
        np.interp(np.arange(61), sizes, table)
        ** np.random.default_rng(0).permutation(bends)[:, None]
    )
    right = np.interp(np.arange(24), [0, 6, 17, 23], np.array([2.07, 3.39, 3.39, 2.07]) / 4)
    prediction = np.repeat(right[:, None], 4, axis=1)
    cached = np.repeat(hit[:, None], 4, axis=1)
    layer_s = 57e-3 / 24
    load_s = 165e-3 / 96
    times = (layer_s / 2, layer_s / 2, load_s, 4, 0.0, 0.0)
    ours = SplitProblem.of(layer_s, times, (hit, prediction, cached))
    return ours, ours.even(budget)


def test_greedy_moves_between_uneven_layers_by_steps_of_the_whole_budget() -> None:
    """From whole budgets too, where steps of a hundredth of an expert, which we once took zeta for,
    move nothing."""
    moves = {}
    for budget in (240, 288, 360, 480, 720):
        ours, even = uneven(budget)
        np.testing.assert_array_equal(ours.greedy(even, 0.01)[0], even)
        budgets, exposed, _, _ = ours.allocate(budget, 0.01, solver="greedy")
        moves[budget] = np.abs(budgets - even).sum() / 2
        assert moves[budget] == 0 or exposed.sum() < ours.answer(even)[1].sum()
    assert sum(moved >= 2.4 for moved in moves.values()) >= 2, moves


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"solver": "gready"}, "did you mean greedy"),
        ({"total_budget": 0}, "above 0 and at most 4 experts"),
        ({"zeta": 0}, "zeta"),
        ({"zeta": 1.01}, "at most 1"),
        ({"load_s": -1}, "not negative"),
        ({"latency_s": -1}, "not negative"),
        ({"host_s": -1}, "not negative"),
        ({"first_window": float("inf")}, "finite"),
        ({"k": 5}, "k 1 to E"),
        ({"k": 0}, "k 1 to E"),
        ({"hit": np.zeros((2, 4))}, "L, E.1"),
        ({"hit": np.zeros(5)}, "L, E.1"),
        ({"prediction": np.zeros((3, 4)), "prediction_hit": np.zeros((3, 4, 5))}, "L, E.1"),
        ({"prediction": np.zeros((1, 4)), "prediction_hit": np.zeros((1, 4, 5))}, "L, E.1"),
        ({"prediction_hit": np.zeros((2, 3, 5))}, "L, E.1"),
        ({"prediction_hit": np.zeros((2, 4, 4))}, "L, E.1"),
        ({"hit": np.full((2, 5), np.nan)}, "from 0 to 1"),
        ({"hit": np.full((2, 5), -0.01)}, "from 0 to 1"),
        ({"prediction": np.full((2, 4), 1.01)}, "from 0 to 1"),
        ({"prediction_hit": np.full((2, 4, 5), 1.01)}, "from 0 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict, said: str) -> None:
    names = (
        "first_window",
        "moe_s",
        "attention_s",
        "load_s",
        "k",
        "hit",
        "prediction",
        "prediction_hit",
    )
    options = (
        dict(zip(names, problem(2, 4, 2, 0), strict=True))
        | {"total_budget": 2, "zeta": 0.01}
        | change
    )
    with pytest.raises(BadUsage, match=said):
        allocate(**options)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_layer_may_end_with_all_of_its_experts(solver: str) -> None:
    hit = np.array([np.zeros(3), np.linspace(0, 1, 3)])
    arguments = (0.0, 0.0, 0.0, 1.0, 1, hit, np.zeros((2, 2)), np.zeros((2, 2, 3)))
    budgets, exposed, _, sizes = allocate(3, 1 / 6, *arguments, solver=solver)
    assert (budgets.tolist(), exposed.tolist(), sizes.tolist()) == ([1, 2], [1, 0], [1, 2])


def test_seconds_may_be_of_any_size() -> None:
    """A power of two scales every number exactly, so only the exposed seconds change."""
    window, moe_s, attention_s, load_s, *others = problem(3, 3, 1, 1)
    answers = []
    for scale in (1.0, 2.0**-40, 2.0**40):
        times = [scale * time for time in (window, moe_s, attention_s, load_s)]
        besides = {"latency_s": 0.25 * scale, "host_s": 0.125 * scale}
        for solver in SOLVERS:
            answers.append(allocate(4, 1 / 8, *times, *others, solver=solver, **besides))
    for number, (budgets, exposed, _, _) in enumerate(answers[2:]):
        np.testing.assert_array_equal(budgets, answers[number % 2][0])
        np.testing.assert_array_equal(
            exposed, answers[number % 2][1] * (2.0**-40, 2.0**40)[number // 2]
        )
    assert len(set(answers[0][0])) > 1, "nothing was moved"


def test_what_is_just_possible() -> None:
    """All experts of every layer, as many per token as there are, times of zero, and shares with
    rounding errors."""
    hit = np.array([[0, 0.25, 0.5, 0.75, 1 + 1e-10]])
    nothing = np.zeros((1, 0)), np.zeros((1, 0, 5))
    exposed, theta, size = expert_split([4], 0.0, 0.0, 0.0, 0.0, 4, hit, *nothing)
    assert (exposed.tolist(), theta.tolist(), size.tolist()) == ([0], [1], [4])
    assert expert_split([1e-12], 0.0, 0.0, 0.0, 1.0, 1, hit, *nothing)[0] == pytest.approx(1), (
        "as good as nothing"
    )
    crumbs = expert_split([1e-12], 0.0, 0.0, 0.0, 1.0, 1, 0.8 * hit, *nothing, latency_s=1.0)[0]
    most = 0.8
    assert crumbs == pytest.approx(1 + 2 - most), (
        "and every expert takes two transfers, a cached one one"
    )
    flat = np.array([[0, 0.1, 0.2, 0.9, 0.9]])
    whole = (0.0, 0.0, 0.5, 1.0, 1)
    for one, other in zip(
        *(expert_split([budget], *whole, flat, *nothing) for budget in (3, 3 + 1e-10)), strict=True
    ):
        assert one.tolist() == other.tolist(), "what rounding adds to a whole expert is nothing"
    assert expert_split([2], 0.0, 0.0, 0.0, 0.0, 1, hit, *nothing, latency_s=1.0)[0].tolist() == [
        0.5
    ]
    assert allocate(9, 0.5, 0.0, 0.0, 0.0, 1.0, 1, hit, *nothing)[0].tolist() == [4], (
        "more than there is"
    )
    for budgets in ([4.01], [0], [1, 1], [[1]], 1):
        with pytest.raises(BadUsage, match="one for each of 1 layers, above 0 and at most 4"):
            expert_split(budgets, 0.0, 0.0, 0.0, 1.0, 1, hit, *nothing)


def test_transfers_take_nothing_besides_unless_said() -> None:
    arguments = problem(2, 4, 2, 3)
    nothing = {"latency_s": 0.0, "host_s": 0.0}
    for answer, expected in (
        (expert_split([1.5, 2], *arguments), expert_split([1.5, 2], *arguments, **nothing)),
        (allocate(3, 0.5, *arguments), allocate(3, 0.5, *arguments, solver="greedy", **nothing)),
    ):
        for one, other in zip(answer, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_latencies_as_the_solvers_take_them() -> None:
    latencies = Latencies(
        attention_s=1.0, moe_s=2.0, head_s=4.0, load_s=8.0, latency_s=16.0, host_s=32.0
    )
    assert latencies.first_window == 5.0
    assert latencies.times(3) == (2.0, 1.0, 8.0, 3, 16.0, 32.0)
    with pytest.raises(FrozenInstanceError):
        latencies.moe_s = 1.0
    assert Latencies(1.0, 2.0, 4.0, 8.0).times(3)[4:] == (0.0, 0.0)


def test_whom_a_split_fits() -> None:
    over_any, over_disk = (
        SolvedSplit(1, "here", np.ones(2), np.ones(2), link=link) for link in (None, "disk")
    )
    assert (
        over_any.fits("here", "disk")
        and over_any.fits("here", None)
        and not over_any.fits("there", None)
    )
    assert over_disk.fits("here", "disk") and over_disk.fits("here", None)
    for machine, link in (("here", "pinned"), ("here", "cpu"), ("there", "disk"), ("a", "disk")):
        assert not over_disk.fits(machine, link)
    assert (over_any.made_for, over_disk.made_for) == ("here", "here over disk")
    assert over_any != replace(over_any), "what holds arrays is the same as itself alone"
    with pytest.raises(FrozenInstanceError):
        over_any.machine = "there"
    assert (over_any.solver, over_any.zeta) == ("dynamic", 0.01)

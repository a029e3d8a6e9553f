"""BuddyMoE's substitution against a brute-force reading of its rules."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.routing.entropy import token_entropy
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Step
from runtime.policies.miss.buddy import STAND_INS, Buddy, substitute


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_experts = draw(st.integers(4, 12))
    top_k = draw(st.integers(1, 4))
    selected = np.stack(
        [rng.permutation(num_experts)[:top_k] for _ in range(draw(st.integers(1, 6)))]
    )
    resident = rng.random(num_experts) < draw(st.floats(0, 1))
    buddies = np.full((num_experts, num_experts - 1), -1)
    for pivot in range(num_experts):
        peers = rng.permutation([e for e in range(num_experts) if e != pivot])[
            : rng.integers(0, num_experts)
        ]
        buddies[pivot, : len(peers)] = peers
    return selected, resident, buddies, draw(st.integers(1, num_experts))


def by_hand(
    selected: np.ndarray, resident: np.ndarray, buddies: np.ndarray, max_rank: int
) -> list[list[int]]:
    """Apply the rules literally: ranks from 0 upward, the first buddy that is resident and not used
    by this token."""
    result = [list(row) for row in selected]
    for row in result:
        for rank, expert in enumerate(row):
            if resident[expert]:
                continue
            for buddy in buddies[expert][:max_rank]:
                if buddy >= 0 and resident[buddy] and buddy not in row:
                    row[rank] = buddy
                    break
    return result


@given(cases())
@settings(max_examples=200)
def test_substitute_follows_the_rules(case: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    before = case[0].copy()
    after = substitute(*case)
    assert after.tolist() == by_hand(*case)
    assert (case[0] == before).all()
    assert all(len(set(row)) == len(row) for row in after.tolist())


SHAPE = Shape(num_layers=1, num_experts=6, top_k=3, expert_nbytes=1)
RESIDENT = np.array([True, False, False, True, True, False])


def chosen(weights: list[float], tau: float = 0.0, **parameters: object) -> list[int]:
    """Return what becomes of a token that selected 0, 1, 2; every expert has the buddies 3 then 4,
    q .6 and .3."""
    buddies = np.tile([3, 4], (1, 6, 1))
    q = np.tile([0.6, 0.3], (1, 6, 1))
    policy = Buddy(**parameters)
    policy.prepare(
        SHAPE,
        Artefacts(
            buddies=buddies, buddy_q=q, entropy=np.full((1, 101), tau), hops=np.arange(6) % 4
        ),
    )
    probabilities = np.array([[0.3, 0.2, 0.1, 0.05, 0.3, 0.05]], np.float32)
    step = Step(
        0, 1, 0, np.array([[0, 1, 2]]), np.array([weights], np.float32), probabilities=probabilities
    )
    return policy.choose(step, Residents(RESIDENT, ~RESIDENT, (0,))).selected[0].tolist()


@pytest.mark.parametrize(
    ("parameters", "after"),
    [
        ({}, [0, 3, 4]),
        ({"rho": 1}, [0, 1, 3]),  # the weakest first
        ({"reach": 1}, [0, 3, 2]),  # one buddy tried, and the second rank's is taken
        ({"reach": 1, "otherwise": "drop"}, [0, 3, -1]),
        ({"beta": 0.5}, [0, 1, 2]),  # two of three wanted are absent
        ({"beta": 0.7}, [0, 3, 4]),
        ({"tau": 0.995}, [0, 1, 2]),  # the token is too certain
        ({"margin": 0.05}, [0, 1, 2]),  # its two strongest are .1 apart
        ({"margin": 0.2}, [0, 3, 4]),
        ({"eta": 2.0}, [0, 4, 3]),  # .3 (1 + 2) beats .6 (1 + .33)
        ({"kappa": 0.3}, [0, 4, 3]),  # 4 is no hop away, 3 is three
        ({"stand_in": "zero"}, [0, -1, -1]),
        (
            {"stand_in": "zero", "reach": 1},
            [0, -1, 2],
        ),  # the ranks that a buddy would serve, and no others
        ({"stand_in": "best_resident"}, [0, 4, 3]),  # the router's .3 before its .05
        ({"stand_in": "best_resident", "rho": 1}, [0, 1, 4]),
        ({"stand_in": "random_resident", "rho": 1, "seed": 1}, [0, 1, 3]),
        ({"stand_in": "random_resident", "rho": 1, "seed": 2}, [0, 1, 4]),
        ({"keep": 1}, [0, 3, 4]),
        ({"keep": 2}, [0, 1, 3]),
        ({"keep": 3}, [0, 1, 2]),
        ({"keep": 4}, [0, 1, 2]),
        ({"keep": 0.5}, [0, 3, 4]),  # one and a half of three is one
        ({"keep": 0.7}, [0, 1, 3]),
        ({"keep": 2, "rho": 2}, [0, 1, 3]),
        ({"keep": 2, "stand_in": "zero"}, [0, 1, -1]),
        ({"keep": 2, "stand_in": "best_resident"}, [0, 1, 4]),
        ({"keep": 2, "reach": 1, "otherwise": "drop"}, [0, 1, 3]),
        ({"rho": 1, "over": "token"}, [0, 1, 3]),
        ({"quota": 0.67}, [0, 3, 4]),
        ({"quota": 0.34}, [0, 1, 3]),
        ({"quota": 0.3}, [0, 1, 2]),
    ],
)
def test_gates_and_choice(parameters: dict[str, object], after: list[int]) -> None:
    assert chosen([0.4, 0.3, 0.3], **parameters) == after


@given(cases(), st.integers(0, 5), st.integers(0, 3), st.sampled_from(["buddy", "zero"]))
@settings(max_examples=100)
def test_rho_counts_a_tokens_replacements_over_all_layers_of_a_pass(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], rho: int, keep: int, stand_in: str
) -> None:
    """Two passes of three layers, which have the same lists but other residents."""
    selected, resident, buddies, _ = case
    num_experts = len(resident)
    top_k = selected.shape[1]
    policy = Buddy(rho=rho, over="token", keep=keep, beta=2.0, stand_in=stand_in)
    lists = np.stack([buddies] * 3)
    known = Artefacts(
        buddies=lists, buddy_q=-np.indices(lists.shape)[2], entropy=np.full((3, 101), -1.0)
    )
    policy.prepare(Shape(3, num_experts, top_k, 1), known)
    for number in range(2):
        left = [rho] * len(selected)
        for layer in range(3):
            there = np.roll(resident, layer + number)
            step = Step(number, 1, layer, selected, np.full(selected.shape, 1 / top_k, np.float32))
            after = policy.choose(step, Residents(there, ~there, (0,))).selected.tolist()
            for token, row in enumerate(selected.tolist()):
                absent = [rank for rank in range(keep, top_k) if not there[row[rank]]]
                served = by_hand_of(
                    row, absent[len(absent) - min(left[token], len(absent)) :], there, buddies
                )
                left[token] -= sum(new != old for new, old in zip(served, row, strict=True))
                if stand_in == "zero":
                    served = [
                        new if new == old else -1 for new, old in zip(served, row, strict=True)
                    ]
                assert after[token] == served


def by_hand_of(
    row: list[int], ranks: list[int], resident: np.ndarray, buddies: np.ndarray
) -> list[int]:
    """Serve these ranks of one token as `by_hand` does."""
    row = list(row)
    for rank in ranks:
        row[rank] = next(
            (b for b in buddies[row[rank]] if b >= 0 and resident[b] and b not in row), row[rank]
        )
    return row


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.2])
def test_the_share_of_tokens_below_the_percentile_is_the_same_at_every_temperature(
    temperature: float,
) -> None:
    """At 1 the percentiles are the profile's, else those of the tokens so far, whatever the
    profile's are."""
    weights = np.random.default_rng(1).dirichlet(np.ones(3), 1000).astype(np.float32)
    profile = np.percentile(token_entropy(weights), np.arange(101))
    policy = Buddy(percentile=30, temperature=temperature, beta=2.0)
    choice = one_step(policy, weights, entropy=profile[None])
    assert (choice.selected != [0, 1, 2]).any(axis=1).mean() == pytest.approx(0.7, abs=0.01)
    after = policy.choose(
        Step(1, 1, 0, np.array([[0, 1, 2]]), weights[:1]), Residents(RESIDENT, ~RESIDENT, (0,))
    )
    entropies = token_entropy(weights, temperature=temperature)
    is_replaced = bool(entropies[0] > np.percentile(entropies, 30))
    assert (after.selected.tolist() == [[0, 3, 4]]) == is_replaced, (
        "one token goes by those of the step before"
    )


def test_lists_by_coactivation_are_others_than_the_newest() -> None:
    lists = np.tile([4, 3], (1, 6, 1)), np.tile([0.6, 0.3], (1, 6, 1))
    for metric, after in ((None, [0, 3, 4]), ("coactivation", [0, 4, 3])):
        assert one_step(
            Buddy(metric=metric), [[0.4, 0.3, 0.3]], coactivated=lists
        ).selected.tolist() == [after]
    assert Buddy().requires == {"buddies", "entropy"}
    assert Buddy(metric="coactivation").requires == {"coactivated", "entropy"}


def test_what_is_on_its_way_is_not_replaced() -> None:
    policy = Buddy()
    q = np.ones((1, 6, 1))
    policy.prepare(
        SHAPE, Artefacts(buddies=np.full((1, 6, 1), 3), buddy_q=q, entropy=np.zeros((1, 101)))
    )
    step = Step(0, 1, 0, np.array([[1, 2, 0]]), np.full((1, 3), 1 / 3, np.float32))
    absent = np.array([False, False, True, False, False, False])
    assert policy.choose(step, Residents(RESIDENT, absent, (0,))).selected.tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_a_quota_that_binds_is_reached_with_every_stand_in(stand_in: str) -> None:
    """Quota left over in one step is used in the next; each layer has its own."""
    rng = np.random.default_rng(0)
    policy = Buddy(stand_in=stand_in, quota=0.2)
    shape = Shape(num_layers=2, num_experts=6, top_k=3, expert_nbytes=1)
    lists = np.stack(
        [[rng.permutation([j for j in range(6) if j != i]) for i in range(6)] for _ in range(2)]
    )
    policy.prepare(
        shape,
        Artefacts(buddies=lists, buddy_q=np.ones(lists.shape), entropy=np.full((2, 101), -1.0)),
    )
    replaced = np.zeros(2)
    for turn in range(200):
        resident = rng.random(6) < 0.6
        selected = np.stack([rng.permutation(6)[:3] for _ in range(1 + 4 * (turn % 10 == 0))])
        step = Step(
            turn,
            1,
            turn % 2,
            selected,
            np.ones(selected.shape, np.float32),
            probabilities=rng.random((len(selected), 6)),
        )
        replaced[turn % 2] += (
            policy.choose(step, Residents(resident, ~resident, (0,))).selected != selected
        ).sum()
    ranks = 3 * np.array([100 + 4 * 20, 100])
    assert (0.2 * ranks - 3 < replaced).all() and (replaced <= 0.2 * ranks).all()


def one_step(
    policy: Buddy,
    weights: Sequence[Sequence[float]],
    *,
    layer: int = 0,
    num_layers: int = 1,
    **artefacts,
) -> Choice:
    """Return a step of tokens that selected 0, 1, 2, one for each row of weights; otherwise as in
    `chosen`."""
    known = {
        "buddies": np.tile([3, 4], (num_layers, 6, 1)),
        "buddy_q": np.tile([0.6, 0.3], (num_layers, 6, 1)),
    }
    known["entropy"] = np.full((num_layers, 101), -1.0)
    policy.prepare(Shape(num_layers, 6, len(weights[0]), 1), Artefacts(**known | artefacts))
    w = np.array(weights, np.float32)
    selected = np.tile(np.arange(w.shape[1]), (len(w), 1))
    probabilities = np.array(
        [[0.3, 0.2, 0.1, 0.05, 0.3, 0.05], [0.1, 0.05, 0.05, 0.2, 0.3, 0.3]], np.float32
    )[: len(w)]
    return policy.choose(
        Step(0, 1, layer, selected, w, probabilities), Residents(RESIDENT, ~RESIDENT, (0,))
    )


@pytest.mark.parametrize(
    ("parameters", "is_fine"),
    [
        ({"percentile": 0.0}, True),
        ({"percentile": 100.0}, True),
        ({"percentile": -0.01}, False),
        ({"percentile": 100.01}, False),
        ({"temperature": 0.01}, True),
        ({"temperature": 0.0}, False),
        ({"reach": 1}, True),
        ({"reach": 0}, False),
        ({"rho": 0}, True),
        ({"rho": -1}, False),
        ({"keep": 0}, True),
        ({"keep": 0.5}, True),
        ({"keep": 7}, True),
        ({"keep": -0.5}, False),
        ({"keep": 1.5}, False),
        ({"keep": float("inf")}, False),
        ({"quota": 0.0}, True),
        ({"quota": 1.0}, True),
        ({"quota": -0.01}, False),
        ({"quota": 1.01}, False),
    ],
)
def test_parameters_at_their_limits(parameters: dict[str, float], is_fine: bool) -> None:
    if is_fine:
        Buddy(**parameters)
    else:
        with pytest.raises(BadUsage, match="buddy needs"):
            Buddy(**parameters)


def test_what_it_must_be_shown() -> None:
    shown = [Buddy(**each).sees_probabilities for each in ({}, {"eta": 1.0}, {"eta": -1.0})]
    assert shown == [False, True, True]
    assert [Buddy(stand_in=name).sees_probabilities for name in STAND_INS] == [
        False,
        False,
        True,
        False,
    ]
    assert [Buddy(quota=quota).every_step for quota in (1.0, 0.99, 0.0)] == [False, True, True]
    assert [Buddy(temperature=heat).every_step for heat in (1.0, 0.8, 1.2)] == [False, True, True]


def test_gates_let_nothing_through_at_their_limits() -> None:
    absent_by_half = [[0.5, 0.5]]  # of 0, which is resident, and 1, which is absent
    assert one_step(Buddy(beta=0.5), absent_by_half).selected.tolist() == [[0, 1]]
    assert one_step(Buddy(beta=0.51), absent_by_half).selected.tolist() == [[0, 3]]
    assert one_step(Buddy(margin=0.25), [[0.25, 0.5, 0.25]]).selected.tolist() == [[0, 1, 2]]
    assert one_step(Buddy(margin=0.26), [[0.25, 0.5, 0.25]]).selected.tolist() == [[0, 3, 4]]
    assert one_step(Buddy(), absent_by_half, entropy=np.ones((1, 101))).selected.tolist() == [
        [0, 1]
    ], "as sure as that"


def test_a_token_of_one_expert_has_no_second() -> None:
    """Its margin is the largest there is."""
    buddies = np.full((1, 6, 1), 3)
    for margin, after in ((1.0, 1), (1.01, 3)):
        policy = Buddy(margin=margin, beta=2.0)  # all its experts are absent
        policy.prepare(
            SHAPE,
            Artefacts(buddies=buddies, buddy_q=np.ones((1, 6, 1)), entropy=np.full((1, 101), -1.0)),
        )
        step = Step(0, 1, 0, np.array([[1]]), np.ones((1, 1), np.float32))
        assert policy.choose(step, Residents(RESIDENT, ~RESIDENT, (0,))).selected.tolist() == [
            [after]
        ]


def test_the_percentile_is_of_the_layer_and_lies_between_those_measured() -> None:
    """Weights of .5, .25, .25 have 1.5 bits of at most log2(3): .946."""
    rows = np.stack([np.linspace(0, 1, 101), np.linspace(0, 2, 101)])
    for layer, percentile, is_replaced in (
        (0, 94.5, True),
        (0, 95.0, False),
        (1, 47.2, True),
        (1, 47.5, False),
    ):
        choice = one_step(
            Buddy(percentile=percentile),
            [[0.5, 0.25, 0.25]],
            layer=layer,
            num_layers=2,
            entropy=rows,
        )
        assert (choice.selected.tolist() == [[0, 3, 4]]) == is_replaced, (layer, percentile)


def test_each_token_goes_by_its_own_probabilities() -> None:
    """q (1 + 2 z) of 3 and 4: .6 (1 + 2 x .05 / .3) and .3 (1 + 2), then .6 (1 + 2 x .2 / .3) and
    .3 (1 + 2)."""
    even = [[0.4, 0.3, 0.3]] * 2
    assert one_step(Buddy(eta=1.0), even).selected.tolist() == [[0, 3, 4]] * 2
    assert one_step(Buddy(eta=2.0), even).selected.tolist() == [[0, 4, 3], [0, 3, 4]]
    assert one_step(Buddy(stand_in="best_resident"), even).selected.tolist() == [[0, 4, 3]] * 2


def test_weights_keep_their_sum_if_asked_to() -> None:
    options = {"reach": 1, "otherwise": "drop"}
    assert one_step(Buddy(**options), [[0.5, 0.25, 0.25]]).weights is None
    choice = one_step(Buddy(**options, renormalise=True), [[0.5, 0.25, 0.25]])
    assert choice.selected.tolist() == [[0, 3, -1]] and choice.weights == pytest.approx(
        np.array([[2 / 3, 1 / 3, 0]])
    )


def test_quota_counts_what_was_seen_and_what_was_served() -> None:
    """Three ranks a step, two of them replaceable, and half of all may be: 1, then 2 (there is room
    for 3), 1, 2."""
    policy = Buddy(quota=0.5)
    one_step(policy, [[0.4, 0.3, 0.3]])
    policy._seen[:] = policy._served[:] = 0
    step = Step(0, 1, 0, np.array([[0, 1, 2]]), np.array([[0.4, 0.3, 0.3]], np.float32))
    there = Residents(RESIDENT, ~RESIDENT, (0,))
    assert [(policy.choose(step, there).selected >= 3).sum() for _ in range(4)] == [1, 2, 1, 2]

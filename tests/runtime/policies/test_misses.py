"""Every miss policy by a step worked through by hand."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadUsage, Incompatible
from artifacts.traces.trace import PREFILL
from runtime.policies import parse
from runtime.policies.base import Artefacts
from runtime.policies.miss.qstar import QStar
from runtime.policies.shared.misses import keep_sum
from tests.runtime.policies.examples import SHAPE, prepared, residents, step

P = [[0.40, 0.25, 0.15, 0.10, 0.06, 0.04]]


def test_substitute_takes_the_closest_score_within_the_tolerance() -> None:
    policy = prepared("miss", "substitute:tolerance=0.5")
    # Expert 1 (.25) is absent; of the residents 2 (.15) is closest, and .10 apart is within half of
    # .25.
    assert policy.choose(step([[0, 1]], P), residents(0, 2, 3)).selected.tolist() == [[0, 2]]
    # 3 (.10) is .15 apart, more than .125: fetched.
    assert policy.choose(step([[0, 1]], P), residents(0, 3, 4)).selected.tolist() == [[0, 1]]
    # Rank 0 is fetched in any case, unless `rank` says otherwise.
    assert policy.choose(step([[0, 1]], P), residents(1, 2)).selected.tolist() == [[0, 1]]
    # Only an equal score is close enough.
    same = prepared("miss", "substitute:tolerance=0,rank=0")
    assert same.choose(
        step([[4, 1]], [[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]]), residents(0, 3)
    ).selected.tolist() == [[3, 1]]
    free = prepared("miss", "substitute:tolerance=1,rank=0")
    assert free.choose(step([[0, 1]], P), residents(1, 2)).selected.tolist() == [[2, 1]]


def test_substitute_prefers_neither_the_likelier_nor_the_same_expert_twice() -> None:
    policy = prepared("miss", "substitute:tolerance=1,rank=0")
    # 2 (.15) is missing: 1 (.25) and 3 (.10) are .10 and .05 apart. Both ranks missing: each takes
    # one of its own.
    assert policy.choose(step([[0, 2]], P), residents(0, 1, 3)).selected.tolist() == [[0, 3]]
    assert policy.choose(step([[2, 4]], P), residents(3, 5)).selected.tolist() == [[3, 5]]


def test_best_resident_takes_the_highest_score_that_the_token_does_not_use() -> None:
    policy = prepared("miss", "best_resident")
    assert policy.choose(step([[0, 5]], P), residents(0, 3, 4)).selected.tolist() == [[0, 3]]
    assert policy.choose(step([[1, 2]], P), residents(0, 3)).selected.tolist() == [[0, 3]]
    # Only one stand-in for two missing experts: the second is fetched. A loading expert is not
    # absent.
    assert policy.choose(step([[1, 2]], P), residents(0)).selected.tolist() == [[0, 2]]
    assert policy.choose(step([[1, 2]], P), residents(0, loading=(1,))).selected.tolist() == [
        [1, 0]
    ]


def test_each_token_is_served_by_itself() -> None:
    policy = prepared("miss", "best_resident")
    both = [[0.4, 0.3, 0.1, 0.1, 0.05, 0.05], [0.1, 0.1, 0.05, 0.05, 0.3, 0.4]]
    chosen = policy.choose(step([[0, 1], [5, 4]], both), residents(2, 3, 4)).selected
    assert chosen.tolist() == [[2, 3], [2, 4]]  # ties go to the lower expert


def test_random_resident_is_seeded_and_reaches_every_resident() -> None:
    draws = [
        [prepared.choose(step([[0, 1]]), residents(1, 2, 3)).selected[0, 0] for _ in range(50)]
        for prepared in (
            prepared_policy("seed=1"),
            prepared_policy("seed=1"),
            prepared_policy("seed=2"),
        )
    ]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) == {2, 3}


def prepared_policy(options: str):
    return prepared("miss", f"random_resident:{options}")


@pytest.mark.parametrize("name", ["zero", "random_resident", "best_resident"])
def test_controls_fill_empty_slots_unless_told_not_to(name: str) -> None:
    there = residents(0, num_free=1)
    filled = prepared("miss", name).choose(step([[1, 2]], P), there).selected
    assert filled.tolist() == [[1, -1 if name == "zero" else 0]]
    static = prepared("miss", f"{name}:fill=no").choose(step([[1, 2]], P), there).selected
    assert static.tolist() == ([[-1, -1]] if name == "zero" else [[0, 2]])


def test_drop_leaves_out_as_much_as_the_layer_bears() -> None:
    """Shares of .5, .3 and .2: the squares of the dropped shares, from the weakest on, are .04, .25
    and 1."""
    taken = step([[0, 1, 2]], weights=[[1.0, 0.6, 0.4]])
    for tolerance, sensitivity, selected in (
        (0.03, 1.0, [0, 1, 2]),
        (0.05, 1.0, [0, 1, -1]),
        (0.26, 1.0, [0, -1, -1]),
        (9.0, 1.0, [0, -1, -1]),  # the strongest is fetched whatever it weighs
        (0.26, 2.0, [0, 1, -1]),
    ):
        policy = parse("miss", f"drop:tolerance={tolerance}")
        policy.prepare(SHAPE, Artefacts(sensitivity=np.full(SHAPE.num_layers, sensitivity)))
        assert policy.choose(taken, residents()).selected.tolist() == [selected], (
            tolerance,
            sensitivity,
        )
    policy.prepare(SHAPE, Artefacts())
    assert policy.choose(taken, residents(2)).selected.tolist() == [[0, -1, 2]], (
        "what is there is computed"
    )
    assert ["sensitivity" in note for note in policy.fallbacks] == [True]
    plain = prepared("miss", "drop")
    assert (
        plain.choose(taken, residents()).selected.tolist() == [[0, -1, -1]] and not plain.fallbacks
    )
    # SpecMD's: its rank 3, counted from 1, and weaker ones
    beyond = prepared("miss", "drop:rank=2")
    assert beyond.choose(taken, residents()).selected.tolist() == [[0, 1, -1]]


def test_drop_may_leave_out_residents_too_and_one_layer_alone() -> None:
    there = residents(*range(6))
    always = prepared("miss", "drop:rank=1,always=yes")
    assert always.every_step
    assert always.choose(step([[4, 2, 0]]), there).selected.tolist() == [[4, -1, -1]]
    skipped = prepared("miss", "drop:rank=0,always=yes,layer=1")
    assert skipped.choose(step([[4, 2, 0]], layer=1), there).selected.tolist() == [[-1, -1, -1]]
    assert skipped.choose(step([[4, 2, 0]]), there).selected.tolist() == [[4, 2, 0]]


def test_zero_drops_every_miss_and_may_keep_the_sum() -> None:
    choice = prepared("miss", "zero").choose(step([[0, 1], [2, 0]]), residents(0))
    assert choice.selected.tolist() == [[0, -1], [-1, 0]] and choice.weights is None
    choice = prepared("miss", "zero:renormalise=yes").choose(step([[0, 1]], P), residents(0))
    assert choice.weights == pytest.approx(np.array([[0.65, 0]]))


def test_each_token_keeps_its_sum() -> None:
    weights = np.array(
        [[0.5, 0.25, 0.25], [0.125, 0.25, 0.125], [0.5, 0.25, 0.25], [0.25, 0.25, 0.25]]
    )
    selected = np.array([[0, -1, 2], [-1, 4, -1], [-1, -1, -1], [3, 4, 5]])
    assert keep_sum(weights, selected) == pytest.approx(
        np.array([[2 / 3, 0, 1 / 3], [0, 0.5, 0], [0, 0, 0], [0.25, 0.25, 0.25]])
    )


@pytest.mark.parametrize("name", ["best_resident", "substitute", "random_resident", "zero", "drop"])
def test_a_policy_that_needs_probabilities_says_so(name: str) -> None:
    policy = prepared("miss", name)
    if policy.sees_probabilities:
        with pytest.raises(AssertionError, match="without router probabilities"):
            policy.choose(step([[0, 1]]), residents(2))
    else:
        policy.choose(step([[0, 1]]), residents(2))


@pytest.mark.parametrize(
    ("ratio", "misses", "fetched"),
    [
        (1.0, 4, 2),  # equally fast: half and half
        (1.0, 5, 3),  # 3 against 2 or 2 against 3 take as long: the larger f
        (0.5, 6, 2),  # a fetch takes two near experts' time: 2 / .5 = 4 = 6 - 2
        (0.25, 4, 1),  # 1 / .25 = 4 against 3; none fetched would take 4 as well
        (0.1, 4, 0),  # one fetch would take 10
        (100.0, 3, 3),
    ],
)
def test_qstar_minimises_the_longer_of_both_times(ratio: float, misses: int, fetched: int) -> None:
    policy = QStar(ratio)
    assert policy.num_fetched(np.ones(misses)) == fetched
    longer = [max(f / ratio, misses - f) for f in range(misses + 1)]
    assert longer[fetched] == min(longer)


def test_qstar_fetches_the_first_wanted() -> None:
    choice = prepared("miss", "qstar:ratio=0.5").choose(
        step([[5, 1], [3, 5], [2, 0]]), residents(1)
    )
    assert choice.near == {3, 2, 0} and choice.selected.tolist() == [[5, 1], [3, 5], [2, 0]]


def test_qstar_fetches_what_most_tokens_want_and_weighs_what_they_take_near() -> None:
    """Of the absent, 4 is wanted by three tokens, 0 by two, 2 and 3 by one each."""
    wanted = step([[2, 4], [3, 4], [0, 4], [0, 1]])
    plain = prepared("miss", "qstar:ratio=0.5").choose(wanted, residents(1))
    assert plain.near == {0, 2, 3}, "1 / 0.5 beside 3; a second load would take 4"
    slow = prepared("miss", "qstar:ratio=0.5,tokens=0.5").choose(wanted, residents(1))
    assert slow.near == {2, 3}, "2 / 0.5 beside 2 + 2; with one load near would take 4 + 2 + 2"


@pytest.mark.parametrize(
    ("text", "num_free", "lent"),
    [
        ("near", 0, 0.0),  # no ratio is known: the link stays idle
        ("near:ratio=0.5", 0, 2.0),  # four near experts take as long as two loads
        ("near:ratio=0.5", 1, 0.5),  # three of them one and a half, and one is fetched
        ("near:ratio=0.5", 3, 0.0),  # the link takes longer
        ("qstar:ratio=0.5", 0, 0.5),  # one of four is fetched: 3 * .5 - 1
        ("qstar:ratio=0.1", 0, 0.4),
    ],
)
def test_what_the_near_tier_takes_longer_is_lent_to_prefetches(
    text: str, num_free: int, lent: float
) -> None:
    choice = prepared("miss", text).choose(step([[0, 1], [2, 3]]), residents(num_free=num_free))
    assert choice.lent == pytest.approx(lent)


def test_fetch_lowest_takes_the_fewest_bits_there_are() -> None:
    choice = prepared("miss", "fetch_lowest", replicas=(16, 4, 3)).choose(
        step([[0, 1], [2, 3]]), residents(1)
    )
    assert choice.bits == {0: 3, 2: 3, 3: 3}


def test_fetch_priority_lowers_the_bottom_share() -> None:
    weights = [[0.5, 0.3], [0.6, 0.1]]
    # Shares: 0 .625, 1 .375, 2 .857, 3 .143; their 60th percentile lies at .575.
    wanted = step([[0, 1], [2, 3]], weights=weights)
    assert prepared("miss", "fetch_priority").choose(wanted, residents()).bits == {1: 4, 3: 4}
    assert prepared("miss", "fetch_priority").choose(wanted, residents(1)).bits == {3: 4}
    assert prepared("miss", "fetch_priority:bits=2,percentile=10").choose(
        wanted, residents()
    ).bits == {3: 2}


def test_fetch_priority_can_leave_out_the_weakest() -> None:
    """Their 30th percentile lies at .352, below 3 alone; a token's first rank is never left out."""
    wanted = step([[0, 1], [2, 3]], weights=[[0.5, 0.3], [0.6, 0.1]])
    choice = prepared("miss", "fetch_priority:drop=30").choose(wanted, residents())
    assert choice.selected.tolist() == [[0, 1], [2, -1]] and choice.bits == {1: 4}
    kept = prepared("miss", "fetch_priority:drop=30").choose(wanted, residents(3))
    assert kept.selected.tolist() == [[0, 1], [2, 3]], "what is resident costs nothing"
    first = prepared("miss", "fetch_priority:drop=60").choose(wanted, residents())
    assert first.selected[:, 0].tolist() == [0, 2]
    with pytest.raises(BadUsage, match="drop <= percentile"):
        prepared("miss", "fetch_priority:drop=70")


def test_cascade_follows_the_weight_of_stronger_ranks() -> None:
    policy = prepared("miss", "cascade")
    # before each rank: 0, .5, .8, .92
    wanted = step([[0, 1, 2, 3]], weights=[[0.5, 0.3, 0.12, 0.08]])
    assert policy.choose(wanted, residents()).bits == {2: 4, 3: 2}
    # Another token wants 3 first: it is fetched at full precision.
    both = step([[0, 1, 2, 3], [3, 1, 0, 2]], weights=[[0.5, 0.3, 0.12, 0.08]] * 2)
    assert policy.choose(both, residents()).bits == {2: 4}


def test_precisions_that_were_not_built_are_refused() -> None:
    with pytest.raises(Incompatible, match="cascade needs replicas of 2 bits; there are 4, 16"):
        prepared("miss", "cascade", replicas=(16, 4))
    with pytest.raises(Incompatible, match="fetch_priority needs replicas of 3 bits"):
        prepared("miss", "fetch_priority:bits=3")


@pytest.mark.parametrize(
    "text",
    [
        "near:ratio=-1",
        "qstar:ratio=0",
        "substitute:tolerance=-0.01",
        "substitute:rank=-1",
        "cascade:high=0.9,low=0.5",
        "fetch_priority:percentile=101",
    ],
)
def test_parameters_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(BadUsage, match=text.split(":")[0]):
        parse("miss", text)


def test_cold_fetches_in_the_prompt_and_computes_near_afterwards() -> None:
    policy = prepared("miss", "cold")
    assert not policy.choose(step([[0, 1]], phase=PREFILL), residents(1)).near
    assert policy.choose(step([[0, 1], [2, 1]]), residents(1, loading=(2,))).near == {0, 2}


def test_cold_fetches_what_a_prompt_wants_beside_answers() -> None:
    mixed = replace(step([[0, 1], [2, 1]], phase=PREFILL), prompts=np.array([False, True]))
    assert prepared("miss", "cold").choose(mixed, residents(5)).near == {0}


def test_cold_swaps_in_what_most_tokens_want_at_its_rate() -> None:
    """Three tokens a step at .2 make .6 of an expert due: one at every second step but one."""
    policy = prepared("miss", "cold:swap=0.2")
    wanted = [[1, 2], [0, 2], [3, 2]]
    assert policy.choose(step(wanted, phase=PREFILL), residents(0)).near == frozenset(), (
        "prompts are fetched"
    )
    assert policy.choose(step(wanted), residents(0)).near == {1, 2, 3}
    assert policy.choose(step(wanted), residents(0)).near == {1, 3}, (
        "1.2 are due, and two is wanted most"
    )
    assert policy.choose(step(wanted), residents(0)).near == {1, 2, 3}
    assert policy.choose(step(wanted), residents(0, 2)).near == {3}, (
        "1.4 are due: of equals the first wanted"
    )
    assert policy.choose(step(wanted, layer=1), residents(0)).near == {1, 2, 3}, (
        "each layer by itself"
    )
    assert policy.choose(step(wanted), residents(0, 1, 3, loading=(2,))).near == {2}, (
        "an expert that is loading is computed near"
    )
    assert policy.choose(step(wanted), residents(0)).near == {1, 3}, (
        "what was due then is due still"
    )


def test_shadow_waits_for_nothing_and_brings_what_pays() -> None:
    """All experts lose alike, so uses decide: 3 is used more than twice as much as resident 1."""
    policy = prepared("miss", "shadow:half_life=1e9")
    for _ in range(3):
        choice = policy.choose(step([[3, 2]]), residents(0, 1))
        assert choice.low == {2, 3} and not choice.near and choice.selected.tolist() == [[3, 2]]
    assert choice.behind == (2, 3)
    assert policy.choose(step([[0, 1]]), residents(0, 1)).low == frozenset()
    # 3 was used 3 times, 0 and 1 once: worth a load; 4 was used once: not.
    assert policy.choose(step([[3, 4]]), residents(0, 1)).behind == (3,)
    late = policy.choose(step([[3, 5]]), residents(0, 1, loading=(3,)))
    assert late.behind == () and late.low == {3, 5}


def test_shadow_fills_what_is_empty() -> None:
    policy = prepared("miss", "shadow")
    assert policy.choose(step([[3, 4]]), residents(num_free=1)).behind == (3,)
    assert policy.choose(step([[3, 4]]), residents()).behind == (), "no slot at all"

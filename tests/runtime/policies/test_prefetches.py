"""Every prefetch policy by steps worked through by hand: three layers of six experts, two
selected."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadUsage
from artifacts.traces.next_use import NEVER, NextUse
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies import parse
from runtime.policies.base import Now, Opening, Step
from runtime.policies.prefetch.score import percentile
from tests.runtime.policies.examples import prepared, step

AHEAD = [0.05, 0.40, 0.05, 0.10, 0.30, 0.10]


def test_score_takes_what_lies_above_the_percentile() -> None:
    # Percentile 80 of six is the fifth smallest, .30: only .40 lies above. At 60 it is .10: .40 and
    # .30 do.
    propose = step([[0, 1]], predicted=[[AHEAD]])
    assert prepared("prefetch", "score").propose(propose, Now()).tolist() == [6 + 1]
    assert prepared("prefetch", "score:percentile=60").propose(propose, Now()).tolist() == [
        6 + 1,
        6 + 4,
    ]


def test_score_joins_tokens_and_wraps_to_the_last_of_each_request() -> None:
    other = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    propose = step([[0, 1], [2, 3]], predicted=[[AHEAD], [other]], layer=1)
    assert prepared("prefetch", "score").propose(propose, Now()).tolist() == [
        12 + 0,
        12 + 1,
    ]  # .55 and .50 in sum
    past = step([[0, 1], [2, 3]], predicted=[[AHEAD], [other]], layer=2, last=[1])
    assert prepared("prefetch", "score").propose(past, Now()).tolist() == [0]


def test_next_gate_goes_through_the_layers_ahead_the_nearest_first() -> None:
    farther = [0.1, 0.1, 0.1, 0.1, 0.1, 0.5]
    here = step([[0, 1]], predicted=[[AHEAD, farther]])
    assert prepared("prefetch", "next_gate:distance=2").propose(here, Now()).tolist() == [
        12 + 5,
        12 + 0,
    ]
    through = prepared("prefetch", "next_gate:distance=2,through=yes")
    assert through.propose(here, Now()).tolist() == [6 + 1, 6 + 4, 12 + 5, 12 + 0]


def test_next_gate_leaves_out_what_is_less_likely_than_least() -> None:
    """As the float32 nearest to it, for one token, through two layers, and for each of several
    tokens; with all left out it proposes nothing."""
    farther = [0.1, 0.1, 0.1, 0.1, 0.1, 0.5]
    here = step([[0, 1]], predicted=[[AHEAD, farther]])

    def proposed(options: str, of: Step) -> list[int]:
        return prepared("prefetch", f"next_gate:{options}").propose(of, Now()).tolist()

    assert proposed("least=0.3", here) == [6 + 1, 6 + 4]
    assert proposed("least=0.31", here) == [6 + 1]
    assert proposed("least=0.41", here) == []
    assert proposed("distance=2,through=yes,least=0.2", here) == [6 + 1, 6 + 4, 12 + 5]
    of_two = step([[0, 1], [2, 3]], predicted=[[AHEAD], [farther]])
    assert proposed("least=0.35", of_two) == [6 + 5, 6 + 1], ".6 and .5 in sum"
    assert proposed("least=0.6", of_two) == []
    with pytest.raises(BadUsage, match="least < 1"):
        parse("prefetch", "next_gate:least=1")


def test_draft_takes_what_was_told_and_asks_the_next_router_for_other_tokens() -> None:
    """The last token and a draft were read while drafting, and another draft was not."""
    told = np.full((3, 3, 2), -1)
    told[:2] = [[[0, 1], [2, 3], [4, 5]], [[0, 2], [3, 4], [1, 5]]]
    steps = [
        replace(step([[0, 1]] * 3, predicted=[[AHEAD]] * 3, layer=layer), foretold=told)
        for layer in range(3)
    ]
    policy = prepared("prefetch", "draft")
    first = policy.propose_first(Opening(0, DECODE, None, told), Now()).tolist()
    assert first == [0, 1, 0, 2, 8, 9, 9, 10]
    proposed = [policy.propose(one, Now()).tolist() for one in steps]
    assert proposed[0] == [8, 9, 9, 10, 6 + 1, 6 + 4, 16, 17, 13, 17]
    assert proposed[1] == [16, 17, 13, 17, 12 + 1, 12 + 4]
    assert proposed[2] == [1, 4], "of the next pass drafts tell nothing"
    untold = replace(steps[0], foretold=None)
    assert policy.propose(untold, Now()).tolist() == [6 + 1, 6 + 4]
    assert not len(policy.propose_first(Opening(0, DECODE, None), Now()))
    nearest = prepared("prefetch", "draft:ahead=1")
    assert nearest.propose(steps[0], Now()).tolist() == [8, 9, 9, 10, 6 + 1, 6 + 4]


def test_frequency_counts_the_requests_under_way() -> None:
    policy = prepared("prefetch", "frequency")
    for layer, selected in enumerate([[[0, 1], [0, 2]], [[3, 4], [3, 5]], [[5, 4], [5, 4]]]):
        policy.propose(step(selected, layer=layer, phase=PREFILL), Now())
    # Layer 1 used 3 twice, 4 and 5 once: two of them, ties by the lower.
    assert policy.propose(step([[0, 1]], pass_index=1), Now()).tolist() == [6 + 3, 6 + 4]
    # A decode step that uses 5 twice more reverses the order.
    policy.propose(step([[5, 1], [5, 1]], layer=1, pass_index=1), Now())
    assert policy.propose(step([[0, 1]], pass_index=2), Now()).tolist() == [6 + 5, 6 + 1]
    # Layer 2 wraps to layer 0, where 0 was used four times and 1 three times.
    assert policy.propose(step([[5, 4]], layer=2, pass_index=2), Now()).tolist() == [0, 1]


def test_frequency_begins_anew_with_a_prefill_and_falls_back_on_all_requests() -> None:
    policy = prepared("prefetch", "frequency")
    policy.propose(step([[4, 5]], layer=1, phase=PREFILL, pass_index=0), Now())
    assert policy.propose(step([[0, 1]], phase=PREFILL, pass_index=1), Now()).tolist() == [
        6 + 4,
        6 + 5,
    ]
    policy.propose(step([[2, 3]], layer=1, phase=PREFILL, pass_index=1), Now())
    assert policy.propose(step([[0, 1]], pass_index=2), Now()).tolist() == [6 + 2, 6 + 3]


def test_affinity_goes_where_earlier_tokens_went() -> None:
    policy = prepared("prefetch", "affinity")
    for number, (here, ahead) in enumerate((([0, 1], [3, 4]), ([2, 5], [1, 2]))):
        policy.propose(step([here], pass_index=number), Now())
        policy.propose(step([ahead], pass_index=number, layer=1), Now())
    # Half of the tokens use 3, and one of one that used 0: (1 + 8 / 2) / (1 + 8), beside (8 / 2) /
    # 9 for 1 and 2.
    assert policy.propose(step([[0, 1]], pass_index=2), Now()).tolist() == [6 + 3, 6 + 4]
    assert policy.propose(step([[2, 5]], pass_index=3), Now()).tolist() == [6 + 1, 6 + 2]
    wider = prepared("prefetch", "affinity:overfetch=2")
    assert wider.propose(step([[0, 1]]), Now()).tolist() == [], "nothing was used there yet"


def test_affinity_reaches_the_next_pass_while_as_many_requests_decode() -> None:
    policy = prepared("prefetch", "affinity")
    policy.propose(step([[0, 1]]), Now())
    for number in (0, 1):
        policy.propose(step([[4, 5]], layer=2, pass_index=number), Now())
        policy.propose(step([[2, 3]], pass_index=number + 1), Now())
    assert policy.propose(step([[4, 5]], layer=2, pass_index=2), Now()).tolist() == [2, 3]
    others = prepared("prefetch", "affinity")
    others.propose(step([[0, 1]]), Now())
    others.propose(step([[4, 5]], layer=2), Now())
    others.propose(step([[2, 3], [2, 3]], pass_index=1), Now())
    assert not others._pairs.any(), "whose token is whose cannot be told"


def test_affinity_follows_requests_that_change_their_places() -> None:
    """Request 3 leaves, 5 comes: what 4 used in the last layer is what its next token goes on
    from."""
    policy = prepared("prefetch", "affinity:distance=1")
    last = step([[0, 1], [2, 3]], layer=2)
    first = step([[4, 5], [0, 1]], layer=0, pass_index=1)
    policy.propose(replace(last, requests=np.array([3, 4])), Now())
    policy.propose(replace(first, requests=np.array([4, 5])), Now())
    pairs = policy._pairs[0, 2]
    assert pairs.sum() == 4 and (pairs[[2, 2, 3, 3], [4, 5, 4, 5]] == 1).all()


def test_frequency_discounts_layers_far_ahead() -> None:
    policy = prepared("prefetch", "frequency:distance=2")
    policy.propose(step([[0, 1]], layer=1, phase=PREFILL), Now())
    policy.propose(step([[2, 3], [2, 4], [2, 5]], layer=2, phase=PREFILL), Now())
    # Shares .5 and .5 one layer ahead (3/4), .5 and 1/6 two layers ahead (2/4).
    assert policy.propose(step([[0, 1]], pass_index=1), Now()).tolist() == [
        6 + 0,
        6 + 1,
        12 + 2,
        12 + 3,
    ]


def test_controls_take_as_many_as_a_token_selects() -> None:
    popular = prepared("prefetch", "popular")
    assert popular.propose(step([[0, 1]]), Now()).tolist() == []
    popular.propose(step([[3, 4], [5, 4], [5, 1]], layer=1), Now())
    assert popular.propose(step([[0, 1]], pass_index=1), Now()).tolist() == [6 + 4, 6 + 5]
    drawn = [
        prepared("prefetch", f"random:seed={seed}").propose(step([[0, 1]]), Now()).tolist()
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] and all(
        len(set(keys)) == 2 and min(keys) >= 6 and max(keys) < 12 for keys in drawn
    )


def test_the_oracle_knows_the_next_steps() -> None:
    steps = tuple(np.array(keys) for keys in ([0, 1], [7, 6], [12, 13], [1, 2], [6, 8]))
    future = NextUse(np.full(18, NEVER), steps, steps)
    now = Now(step=1)
    wanted = step([[1, 0]], layer=1)
    assert prepared("prefetch", "oracle:distance=1", next_use=future).propose(
        wanted, now
    ).tolist() == [12, 13]
    assert prepared("prefetch", "oracle", next_use=future).propose(wanted, now).tolist() == [
        12,
        13,
        1,
        2,
        6,
        8,
    ]
    assert (
        prepared("prefetch", "oracle", next_use=future).propose(wanted, Now(step=4)).tolist() == []
    )


@pytest.mark.parametrize(
    "text", ["score:percentile=101", "frequency:distance=0", "oracle:distance=0"]
)
def test_parameters_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(BadUsage, match=text.split(":")[0]):
        parse("prefetch", text)


@pytest.mark.parametrize("percent", [0, 37.5, 80, 100])
@pytest.mark.parametrize("width", [1, 2, 7, 60])
def test_percentiles_are_numpys(percent: float, width: int) -> None:
    values = np.random.default_rng(width).random((5, width))
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent, axis=1))

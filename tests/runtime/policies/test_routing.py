"""Cache-aware routing by tokens worked through by hand."""

import numpy as np
import pytest

from artifacts.errors import BadUsage
from runtime.policies import parse
from tests.runtime.policies.examples import prepared, step

P = (
    np.exp([[0.0, -1.0, -2.0, -3.0, -4.0, -5.0]])
    / np.exp([[0.0, -1.0, -2.0, -3.0, -4.0, -5.0]]).sum()
)


def resident(*experts: int) -> np.ndarray:
    return np.isin(np.arange(6), experts)


def route(text: str, there: np.ndarray, weights: list[list[float]] | None = None):
    return prepared("routing", text).route(step([[0, 1]], P.tolist(), weights=weights), there)


def test_residents_gain_a_share_of_the_spread() -> None:
    # Spread 5, strength .3: residents gain 1.5. Expert 2 at -2 + 1.5 passes 1 at -1; 3 at -1.5 does
    # not.
    assert route("cache_aware:strength=0.3", resident(2, 3)).selected.tolist() == [[0, 2]]
    assert route("cache_aware:strength=0.3", resident(1, 2)).selected.tolist() == [[0, 1]]
    assert route("cache_aware:strength=1", resident(4, 5)).selected.tolist() == [[4, 5]]
    assert route("cache_aware:strength=1,keep=1", resident(4, 5)).selected.tolist() == [[0, 4]]


def test_a_choice_that_stands_is_the_routers_own_step() -> None:
    own = step([[1, 0]], P.tolist())
    assert prepared("routing", "cache_aware:strength=0").route(own, resident(4, 5)) is own


def test_the_original_probabilities_weigh_in_the_scale_of_the_router() -> None:
    routed = route("cache_aware:strength=0.3", resident(2))
    assert routed.weights == pytest.approx(P[:, [0, 2]])
    normalised = P[:, :2] / P[:, :2].sum()
    routed = route("cache_aware:strength=0.3", resident(2), normalised.tolist())
    assert routed.weights == pytest.approx(P[:, [0, 2]] / P[:, :2].sum())
    routed = route("cache_aware:strength=0.3,renormalise=yes", resident(2), normalised.tolist())
    assert routed.weights.sum() == pytest.approx(1)


def test_tokens_whose_experts_stay_keep_their_weights_to_the_bit() -> None:
    two = step(
        [[0, 1], [0, 2]],
        [*P.tolist(), P[0, [0, 2, 1, 3, 4, 5]].tolist()],
        weights=[[0.7, 0.2], [0.6, 0.1]],
    )
    routed = prepared("routing", "cache_aware:strength=0.3").route(two, resident(2))
    assert routed.selected.tolist() == [[0, 2], [0, 2]]
    assert routed.weights[1].tolist() == two.weights[1].tolist()


def test_the_spread_is_a_running_mean_of_each_layer() -> None:
    policy = prepared("routing", "cache_aware:strength=0.3")
    flat = np.exp([[0.0, -0.1, -0.2, -0.3, -0.4, -1.0]])
    # spread 1, three tokens
    policy.route(step([[0, 1]] * 3, (flat / flat.sum()).tolist() * 3), resident())
    # (3 * 1 + 5) / 4 = 2, a gain of .6: expert 2 does not pass. Another layer is not affected.
    assert policy.route(step([[0, 1]], P.tolist()), resident(2)).selected.tolist() == [[0, 1]]
    assert policy.route(step([[0, 1]], P.tolist(), layer=1), resident(2)).selected.tolist() == [
        [0, 2]
    ]


def test_probabilities_that_underflow_are_no_infinity() -> None:
    p = [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert route("cache_aware", resident(3)).weights is not None
    routed = prepared("routing", "cache_aware").route(step([[0, 1]], p), resident(3))
    assert routed.selected.tolist() == [[0, 3]] and np.isfinite(routed.weights).all()


def test_negative_strengths_are_refused() -> None:
    with pytest.raises(BadUsage, match="strength >= 0"):
        parse("routing", "cache_aware:strength=-1")


def test_the_strongest_that_are_left_take_the_place_of_the_pruned() -> None:
    """Experts 1 and 2 of layer 0 are pruned: expert 3 comes in, in the sum of the token's
    weights; what is resident says nothing, and a token without a pruned expert keeps its step."""
    weights = [[0.6, 0.3]]
    routed = route("pruned:experts=6", resident(1, 2), weights)
    assert routed.selected.tolist() == [[0, 3]]
    assert routed.weights == pytest.approx(0.9 * P[:, [0, 3]] / P[0, [0, 3]].sum())
    own = step([[0, 1]], P.tolist())
    assert prepared("routing", "pruned:experts=c").route(own, resident()) is own


@pytest.mark.parametrize(
    ("experts", "says"),
    [("6x", "hexadecimal"), ("1f", "leaves 1 experts"), ("f" * 99, "beyond"), ("-1", "beyond")],
)
def test_what_cannot_be_pruned_is_refused(experts: str, says: str) -> None:
    with pytest.raises(BadUsage, match=says):
        prepared("routing", f"pruned:experts={experts}")


AHEAD = [[[0.4, 0.3, 0.2, 0.1, 0.0, 0.0]]]


def test_what_was_foretold_a_layer_before_is_selected() -> None:
    """Layer 0 predicts 0 and 1; the router then selects 0 and 5. 1 had three sevenths, and weighs
    as 5 would have."""
    policy = prepared("routing", "pre_gated")
    first = step([[2, 3]], weights=[[0.6, 0.4]], predicted=AHEAD)
    assert policy.route(first, resident()) is first, "no layer comes before"
    routed = policy.route(
        step([[5, 0]], weights=[[0.6, 0.4]], layer=1, predicted=AHEAD), resident()
    )
    assert routed.selected.tolist() == [[0, 1]] and routed.weights[0] == pytest.approx([0.4, 0.4])
    routed = policy.route(
        step([[0, 5]], weights=[[0.5, 0.5]], layer=2, predicted=AHEAD), resident()
    )
    assert routed.selected.tolist() == [[0, 1]] and routed.weights[0] == pytest.approx([0.5, 3 / 7])
    own = step([[1, 0]], weights=[[0.6, 0.4]], layer=0, pass_index=1, predicted=AHEAD)
    assert policy.route(own, resident()) is own, "the next pass begins"


def test_a_foretold_choice_that_stands_is_the_routers_own_step() -> None:
    policy = prepared("routing", "pre_gated")
    policy.route(step([[2, 3]], predicted=AHEAD), resident())
    own = step([[1, 0]], weights=[[0.6, 0.4]], layer=1, predicted=AHEAD)
    assert policy.route(own, resident()) is own

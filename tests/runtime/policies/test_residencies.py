"""Residency: what shares the fast tier with the slots, and what a prompt places."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadUsage, Incompatible
from artifacts.quantisation.bit_allocation import prefix_split
from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import NOTHING, USUAL_WIDTHS, WIDTHS, column_of, columns_of
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies import parse
from runtime.policies.base import Artefacts
from tests.runtime.policies.examples import SHAPE, prepared, step

NBYTES = {16: 160, 4: 40, 3: 30, 2: 20, 1: 10}


def table(losses: list[float] | np.ndarray, experts: tuple[int, ...]) -> np.ndarray:
    """Losses [L, E, W] from those at 1, 2, 3 and 4 bits; leaving an expert out costs twice the
    first."""
    out = np.full((*experts, len(WIDTHS)), np.nan)
    out[..., columns_of(USUAL_WIDTHS)] = losses
    out[..., column_of(NOTHING)] = 2 * out[..., column_of(1)]
    return out


def shadow(text: str, *, use: np.ndarray | None = None, nbytes: dict[int, int] = NBYTES):
    policy = parse("residency", text)
    use = np.ones((SHAPE.num_layers, SHAPE.num_experts)) if use is None else use
    loss = table([8.0, 4.0, 2.0, 1.0], use.shape)
    policy.prepare(SHAPE, Artefacts(replicas=Replicas(nbytes, loss, loss * use[..., None], use)))
    return policy


def test_one_width_leaves_the_rest_to_slots() -> None:
    """18 replicas of 30 bytes are 540; 480 more are a whole expert for each of the three layers,
    and less are none."""
    fast = shadow("shadow:bits=3").share(1020)
    assert fast.shadows.tolist() == [3] * 18 and fast.num_slots == 3
    assert (
        shadow("shadow:bits=3,slots=no").share(1020).num_slots
        == shadow("shadow:bits=3").share(1019).num_slots
        == 0
    )
    assert shadow("shadow:bits=3").share(10**9).num_slots == SHAPE.num_keys


def test_uniform_is_the_widest_that_fits() -> None:
    assert shadow("shadow:bits=uniform").share(18 * 40 - 1).shadows.tolist() == [3] * 18
    assert shadow("shadow:bits=uniform").share(18 * 40).shadows.tolist() == [4] * 18


def test_mixed_gives_the_bits_to_the_experts_used_most() -> None:
    use = np.ones((3, 6))
    use[1, 4] = 100
    fast = shadow("shadow", use=use).share(18 * 10 + 30)
    assert fast.shadows.tolist() == [1] * 10 + [4] + [1] * 7 and fast.num_slots == 0


def test_pruned_leaves_out_what_costs_least() -> None:
    """Nothing for 9 experts that are hardly used pays for 2 bits of the others, and for the zeros
    that the 9 share."""
    use = np.where(np.arange(18) % 2, 1.0, 1e-3).reshape(3, 6)
    fast = shadow("shadow:bits=pruned", use=use).share(18 * 10 + 10)
    assert fast.shadows.tolist() == [0, 2] * 9 and fast.num_slots == 0
    with pytest.raises(BadUsage, match="at 1 bits: give at least 180 bytes"):
        shadow("shadow:bits=pruned").share(179)


def test_prefix_and_random_spend_no_more_than_the_budget() -> None:
    use = np.random.default_rng(0).random((3, 6))
    budget = 18 * 24
    for bits in ("mixed", "prefix", "random"):
        found = shadow(f"shadow:bits={bits}", use=use).share(budget).shadows
        assert budget - 60 < sum(NBYTES[width] for width in found.tolist()) <= budget, bits
    mixed, random = (
        shadow(f"shadow:bits={bits}", use=use).share(budget).shadows for bits in ("mixed", "random")
    )
    assert sorted(mixed) == sorted(random) and mixed.tolist() != random.tolist()
    for layer, widths in enumerate(
        shadow("shadow:bits=prefix", use=use).share(budget).shadows.reshape(3, 6)
    ):
        assert (np.diff(widths[np.argsort(-use[layer])]) <= 0).all()


def test_only_widths_that_were_built() -> None:
    fast = shadow("shadow", nbytes={16: 160, 2: 20, 4: 40}).share(18 * 20 + 60)
    assert sorted(fast.shadows.tolist()) == [2] * 15 + [4] * 3
    with pytest.raises(Incompatible, match="shadow needs replicas of 3 bits; there are 2, 4, 16"):
        shadow("shadow:bits=3", nbytes={16: 160, 2: 20, 4: 40})


def test_a_budget_that_does_not_hold_them_is_refused_with_one_that_does() -> None:
    with pytest.raises(
        BadUsage,
        match=r"does not hold a replica of every expert at 1 bits: give at least 180 bytes",
    ):
        shadow("shadow").share(179)
    with pytest.raises(
        BadUsage, match="one of mixed, pruned, uniform, prefix, random, 0.6, 0.8, 1, .* 8, not '5'"
    ):
        parse("residency", "shadow:bits=5")


def test_the_prompt_places_by_counts_and_weights() -> None:
    """Layer 0: expert 1 counts twice, expert 5 weighs most; S is the mean of both shares."""
    policy = prepared("residency", "hot")
    policy.observe(
        step([[1, 5], [1, 2], [3, 5]], phase=PREFILL, weights=[[0.2, 0.8], [0.5, 0.5], [0.1, 0.9]])
    )
    counts = np.array([0, 2, 1, 1, 0, 2]) / 6
    weights = np.array([0, 0.7, 0.5, 0.1, 0, 1.7]) / 3
    assert np.allclose(policy.importance(0), (counts + weights) / 2)
    placed = policy.place(step([[1, 2]]), (2,))
    assert placed.resident.tolist() == [5, 1] and placed.near_bits.tolist() == [16] * 6
    assert policy.place(step([[1, 2]]), (2,)) is None, "once per sequence"
    policy.observe(step([[4, 0]], phase=PREFILL))
    assert policy.place(step([[1, 2]]), (2,)).resident.tolist() == [0, 4], (
        "the next prompt counts alone"
    )


@pytest.mark.parametrize(
    ("scores", "weighed"), [("shares", [1.0, 0.75, 0.25]), ("router", [0.7, 0.375, 0.125])]
)
def test_a_token_weighs_by_how_sure_the_router_is_of_it_or_like_any_other(
    scores: str, weighed: list[float]
) -> None:
    """The router gives the first token's expert 70 %, those of the second 37.5 and 12.5 %; the
    model renormalises."""
    policy = prepared("residency", f"hot:balance=0,scores={scores}")
    assert policy.sees_probabilities == (scores == "router")
    first = [0.7, 0.1, 0.1, 0.1, 0, 0]
    second = [0.5, 0.375, 0.125, 0, 0, 0]
    policy.observe(step([[0]], [first], phase=PREFILL, weights=[[1.0]]))
    policy.observe(step([[1, 2]], [second], phase=PREFILL, weights=[[0.75, 0.25]]))
    assert np.allclose(policy.importance(0)[:3], np.array(weighed) / sum(weighed))


def test_placed_for_all_that_are_decoded_and_that_wait() -> None:
    """Request 1 is read, then decoded while the two halves of 2 are read, then both are decoded."""
    policy = prepared("residency", "hot")

    def told(
        selected: list[list[int]],
        requests: list[int],
        prompts: list[bool] | None,
        phase: int = PREFILL,
    ):
        mask = None if prompts is None else np.array(prompts)
        here = replace(step(selected, phase=phase), requests=np.array(requests), prompts=mask)
        policy.observe(here)
        return policy.place(here, [2])

    assert told([[0, 1], [0, 1]], [1, 1], None) is None
    assert told([[5, 4], [2, 3]], [1, 2], [False, True]).resident.tolist() == [0, 1], (
        "2 has been seen by half"
    )
    assert told([[5, 4], [2, 3], [2, 3]], [1, 2, 2], [False, True, True]) is None, (
        "no other is decoded yet"
    )
    assert told([[5, 4], [5, 4]], [1, 2], None, DECODE).resident.tolist() == [2, 3], (
        "3 tokens beside 2"
    )
    assert told([[5, 4], [5, 4]], [1, 2], None, DECODE) is None


@pytest.mark.parametrize(("text", "is_awaited"), [("hot", False), ("hot:migrate=before", True)])
def test_only_a_migration_before_decoding_is_awaited(text: str, is_awaited: bool) -> None:
    policy = prepared("residency", text)
    policy.observe(step([[1, 5]], phase=PREFILL))
    assert policy.place(step([[1, 2]]), (2,)).is_awaited == is_awaited


def test_cold_experts_get_the_prefix_split() -> None:
    shape = Shape(1, 6, 2, 160)
    loss = table(np.sort(np.random.default_rng(1).random((1, 6, 4)))[..., ::-1], (1, 6))
    policy = parse("residency", "hot:avg_bits=2.5")
    policy.prepare(shape, Artefacts(replicas=Replicas(NBYTES, loss, loss, loss[..., 0])))
    policy.observe(step([[4, 1], [4, 2], [4, 0]], phase=PREFILL))
    bits = policy.place(step([[1, 2]]), (1,)).near_bits
    order = [0, 1, 2, 3, 5]  # equal counts go to the lower expert
    assert bits[4] == 16 and bits[order].tolist() == prefix_split(
        loss[0, order][:, columns_of(USUAL_WIDTHS)], 2.5
    )
    assert policy.widths == (1, 2, 3, 4)


def test_cold_experts_are_alike_without_the_selector() -> None:
    policy = parse("residency", "hot:avg_bits=3,bits=uniform")
    loss = table(np.ones(4), (1, 6))
    policy.prepare(
        Shape(1, 6, 2, 160), Artefacts(replicas=Replicas(NBYTES, loss, loss, loss[..., 0]))
    )
    policy.observe(step([[4, 1]], phase=PREFILL))
    assert policy.place(step([[1, 2]]), (1,)).near_bits.tolist() == [3, 16, 3, 3, 3, 3]


def test_slots_go_where_they_spare_loads() -> None:
    """Layers 0 and 2 gain nothing beyond one expert, layer 1 gains with each."""
    flat = [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    falling = [2.0, 1.8, 1.5, 1.2, 0.9, 0.5, 0.0]
    policy = parse("residency", "allocated")
    policy.prepare(SHAPE, Artefacts(loads=np.array([flat, falling, flat])))
    assert policy.capacities(8, SHAPE).tolist() == [1, 6, 1] and not policy.fallbacks
    policy.prepare(SHAPE, Artefacts())
    assert policy.capacities(8, SHAPE).tolist() == [3, 3, 2]
    assert ["no curves are stored" in note for note in policy.fallbacks] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "hot:avg_bits=0.5",
        "hot:avg_bits=5",
        "hot:balance=2",
        "hot:migrate=now",
        "hot:scores=weights",
        "hot:bits=even",
        "hot:avg_bits=2.5,bits=uniform",
    ],
)
def test_parameters_out_of_range(text: str) -> None:
    with pytest.raises(BadUsage, match="hot"):
        parse("residency", text)

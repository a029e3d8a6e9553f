"""Blend weighs its sources by how right they were, and proposes by chance."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadUsage
from artifacts.routing.predictors import RECORDED
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies import parse
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.prefetch.blend import Blend
from tests.runtime.policies.blend_reference import Reference
from tests.runtime.policies.examples import step

SHAPE = Shape(num_layers=3, num_experts=8, top_k=2, expert_nbytes=1)


def prepared(text: str) -> Blend:
    policy = parse("prefetch", text)
    policy.prepare(SHAPE, Artefacts(predictors=RECORDED))
    return policy


def said(experts: np.ndarray) -> np.ndarray:
    """Return a distribution [E] that names these experts."""
    p = np.full(SHAPE.num_experts, 0.02)
    p[experts] = 0.44
    return p / p.sum()


def decoded(
    policy: Blend, num_passes: int, right: str, seed: int = 0
) -> list[tuple[list[int], np.ndarray]]:
    """Return what was proposed at layer 0, and what layer 1 then used: one source is right, the
    other names random experts."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(num_passes):
        uses = [rng.permutation(SHAPE.num_experts)[:2] for _ in range(4)]
        for layer in range(3):
            true = said(uses[layer + 1])
            false = said(rng.permutation(SHAPE.num_experts)[:2])
            routers, fitted = (true, false) if right == "next_gate" else (false, true)
            here = step(
                [uses[layer].tolist()], layer=layer, pass_index=number, predicted=[[routers]]
            )
            here = replace(here, learned=fitted[None, None].astype(np.float32))
            proposed = policy.propose(here, Now()).tolist()
            if layer == 0:
                found.append((proposed, np.sort(uses[1]) + SHAPE.num_experts))
    return found


@pytest.mark.parametrize("right", ["next_gate", "learned"])
def test_the_source_that_was_right_is_believed(right: str) -> None:
    late = decoded(prepared("blend:distance=1,floor=0.5"), 120, right)[60:]
    assert np.mean([sorted(proposed) == wanted.tolist() for proposed, wanted in late]) > 0.95


def test_without_predictors_the_routers_alone() -> None:
    policy = prepared("blend:distance=1,floor=0.5,learned=no")
    assert not policy.requires and not policy.reads_learned and policy.reads_predictions
    late = decoded(policy, 80, "next_gate")[40:]
    assert np.mean([sorted(proposed) == wanted.tolist() for proposed, wanted in late]) > 0.95


def test_a_lower_floor_brings_more() -> None:
    sizes = [
        np.mean(
            [
                len(proposed)
                for proposed, _ in decoded(
                    prepared(f"blend:distance=1,floor={floor}"), 60, "learned"
                )
            ]
        )
        for floor in (0.05, 0.3, 0.9)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_sooner_layers_come_first_then_likelier_experts() -> None:
    policy = prepared("blend:distance=2,floor=0.01,far=0.01,learned=no")
    ahead = np.array(
        [
            [0.05, 0.05, 0.4, 0.3, 0.05, 0.05, 0.05, 0.05],
            [0.5, 0.1, 0.1, 0.06, 0.06, 0.06, 0.06, 0.06],
        ]
    )
    proposed = policy.propose(step([[0, 1]], predicted=[ahead]), Now())
    layers, experts = np.divmod(proposed, SHAPE.num_experts)
    assert (np.diff(layers) >= 0).all() and set(layers) == {1, 2}
    assert experts[0] == 2 and experts[layers == 2][0] == 0


def test_a_prompt_goes_by_what_its_tokens_name() -> None:
    policy = prepared("blend:learned=no,distance=1")
    rows = np.stack([said(np.array([3, 4])), said(np.array([4, 5]))])[:, None]
    proposed = policy.propose(step([[0, 1], [1, 2]], phase=PREFILL, predicted=rows), Now())
    assert proposed.tolist() == [8 + 4, 8 + 3, 8 + 5]


def test_requests_decoded_together_are_one_visit() -> None:
    policy = prepared("blend:distance=1,floor=0.4,learned=no")
    for number in range(40):
        named = [np.array([number % 4, 4 + number % 3]), np.array([7, (number + 1) % 4])]
        rows = np.stack([said(experts) for experts in named])[:, None]
        here = step([[0, 1], [0, 1]], pass_index=number, predicted=rows, last=[0, 1])
        proposed = set(policy.propose(here, Now()).tolist())
        there = step(
            [experts.tolist() for experts in named],
            layer=1,
            pass_index=number,
            predicted=rows,
            last=[0, 1],
        )
        policy.propose(there, Now())
    assert proposed == {8 + expert for experts in named for expert in experts.tolist()}


@pytest.mark.parametrize("text", ["blend", "blend:distance=5,floor=0.1,far=0.2,learned=no"])
def test_compiled_and_plain_agree(text: str) -> None:
    """Prompts, tokens alone and together, dropped ranks; a prompt's last layer predicts the next
    pass."""
    rng = np.random.default_rng(0)
    policy = prepared(text)
    kinds = [(PREFILL, 5), (DECODE, 1), (DECODE, 1), (DECODE, 3)]
    plain = Reference(SHAPE, policy)
    for number in range(60):
        phase, num_tokens = kinds[rng.integers(4)]
        last = np.arange(num_tokens) if phase == DECODE else np.array([1, num_tokens - 1])
        for layer in range(SHAPE.num_layers):
            ids = np.stack([rng.permutation(SHAPE.num_experts)[:2] for _ in range(num_tokens)])
            ids[rng.random(ids.shape) < 0.1] = -1
            predicted, learned = rng.dirichlet(np.full(8, 0.3), (2, num_tokens, 5)).astype(
                np.float32
            )
            here = Step(
                number,
                phase,
                layer,
                ids,
                np.ones(ids.shape, np.float32),
                None,
                predicted,
                last,
                learned,
            )
            assert sorted(policy.propose(here, Now())) == sorted(plain.propose(here)), (
                number,
                layer,
            )
            assert np.allclose(policy._predicted, plain._chances._predicted, equal_nan=True), (
                number,
                layer,
            )


@pytest.mark.parametrize("text", ["blend:distance=0", "blend:floor=0", "blend:far=1.5"])
def test_parameters_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="blend needs"):
        parse("prefetch", text)


def test_what_it_needs_follows_from_its_parameters() -> None:
    assert parse("prefetch", "blend").requires == {"predictors"}
    both = parse("prefetch", "blend:maps=yes")
    assert (
        both.requires == {"predictors", "maps"} and both.sees_embeddings and both.sees_probabilities
    )


def test_a_step_of_another_kind_changes_nothing_it_saw() -> None:
    policy = prepared("blend:distance=1,learned=no")
    here = step([[0, 1]], predicted=[[said(np.array([1, 2]))]])
    before = here.predicted.copy()
    policy.propose(here, Now())
    assert np.array_equal(here.predicted, before) and isinstance(here, Step)

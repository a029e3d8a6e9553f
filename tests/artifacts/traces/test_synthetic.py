"""Synthetic traces: the requested shape, the same trace for the same seed, each dial moving its own
statistic."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate, parse_dials
from artifacts.traces.trace import DECODE, PREFILL, Trace
from tools.lab.trace_statistics import measure, recall

SHAPE = Shape(num_layers=3, num_experts=12, top_k=3, expert_nbytes=1)
SMALL = Dials(tokens=240, requests=4, prompt=20)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dials, Shape]:
    num_experts = draw(st.integers(1, 20))
    shape = Shape(draw(st.integers(1, 5)), num_experts, draw(st.integers(1, num_experts)), 1)
    chance = st.floats(0, 1)
    requests = draw(st.integers(1, 5))
    prompt = draw(st.integers(0, 6))
    dials = Dials(
        skew=draw(st.floats(0, 8)),
        locality=draw(chance),
        similarity=draw(chance),
        predictability=draw(chance),
        tokens=requests * (prompt + draw(st.integers(1, 8))),
        requests=requests,
        prompt=prompt,
        batch=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 99)),
        grading=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    )
    return dials, shape


@given(cases())
@settings(max_examples=60)
def test_any_shape_gives_a_sound_trace(case: tuple[Dials, Shape]) -> None:
    dials, shape = case
    trace = generate(dials, shape)
    assert len(trace) == dials.length * dials.requests * shape.num_layers
    assert trace.experts.shape[1] == shape.top_k and trace.experts.max() < shape.num_experts
    assert all(len(set(row)) == shape.top_k for row in trace.experts.tolist())
    assert (np.diff(trace.weights, axis=1) <= 0).all() and (trace.weights > 0).all()
    for distributions in (trace.probabilities, trace.predicted[:, 0]):
        assert np.allclose(distributions.sum(axis=1), 1, atol=1e-5)
    ranked = np.take_along_axis(trace.probabilities, trace.experts.astype(int), axis=1)
    assert np.allclose(ranked, trace.weights)
    assert np.allclose(
        np.sort(trace.probabilities)[:, -shape.top_k :].sum(axis=1), ranked.sum(axis=1), rtol=1e-5
    )


@given(cases())
@settings(max_examples=30)
def test_passes_are_those_of_batches(case: tuple[Dials, Shape]) -> None:
    """Every pass runs each layer once; prompts come whole, then one token of each request of the
    batch."""
    dials, shape = case
    steps = list(generate(dials, shape, detailed=False).steps())
    assert [step.layer for step in steps] == list(range(shape.num_layers)) * (
        len(steps) // shape.num_layers
    )
    groups = -(-dials.requests // dials.batch)
    per_group = dials.length - dials.prompt + (dials.prompt > 0)
    assert steps[-1].pass_index + 1 == groups * per_group
    for step in steps:
        assert step.phase == (PREFILL if step.token.min() < dials.prompt else DECODE)
        assert len(set(step.request.tolist())) <= dials.batch
        if step.phase == DECODE:
            assert len(step.request) == len(set(step.request.tolist()))
        else:
            assert len(step.request) == len(set(step.request.tolist())) * dials.prompt


@given(cases())
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_trace(case: tuple[Dials, Shape]) -> None:
    dials, shape = case
    first = generate(dials, shape)
    again = generate(dials, shape)
    sparse = generate(dials, shape, detailed=False)
    assert all(
        np.array_equal(column, again.columns()[name]) for name, column in first.columns().items()
    )
    assert all(
        np.array_equal(column, first.columns()[name]) for name, column in sparse.columns().items()
    )
    assert parse_dials(str(dials)) == dials


def test_another_seed_gives_another_trace() -> None:
    first, other = (generate(replace(SMALL, seed=seed), SHAPE) for seed in (0, 1))
    assert not np.array_equal(first.experts, other.experts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("dial", "statistic", "values"),
    [
        ("skew", "concentration", (0.0, 0.4, 0.8, 1.5, 3.0)),
        ("locality", "reuse", (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("similarity", "similarity", (0.0, 0.3, 0.7, 1.0)),
        ("predictability", "prediction", (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("grading", "near_prediction", (0.0, 0.25, 0.5, 0.75, 1.0)),
    ],
)
def test_a_dial_moves_its_statistic(
    dial: str, statistic: str, values: tuple[float, ...], seed: int
) -> None:
    start = Dials(tokens=1200, requests=4, prompt=60, skew=1.2, seed=seed)
    reached = [
        getattr(
            measure(generate(replace(start, **{dial: value}), SHAPE), SHAPE.num_experts), statistic
        )
        for value in values
    ]
    assert all(lower < higher for lower, higher in pairwise(reached)), reached


def test_graded_predictions_rank_what_they_miss_just_behind() -> None:
    """As the bundled model's routers do: of four experts .80, .91 and .95 are among the first 4, 6
    and 8."""
    shape = Shape(num_layers=6, num_experts=32, top_k=4, expert_nbytes=1)
    sunk = Dials(skew=1.4, locality=0.0, predictability=0.8, tokens=400, requests=4)
    graded = replace(sunk, grading=0.88)
    traces = [generate(dials, shape) for dials in (sunk, graded)]
    recalls = [[recall(trace, width) for width in (4, 6, 8)] for trace in traces]
    assert recalls == [
        pytest.approx([0.8, 0.8, 0.8], abs=0.01),
        pytest.approx([0.8, 0.91, 0.95], abs=0.015),
    ]
    before, after = (trace.columns() for trace in traces)
    assert all(np.array_equal(before[name], after[name]) for name in before if name != "predicted")
    assert str(graded) == f"{sunk},grading=0.88"


@pytest.mark.parametrize("predictability", [0.3, 0.6, 0.9, 1.0])
def test_grading_leaves_the_predictability(predictability: float) -> None:
    dials = Dials(predictability=predictability, grading=1.0)
    assert recall(generate(dials, SHAPE), SHAPE.top_k) == pytest.approx(predictability, abs=0.02)


def test_ends_of_the_dials() -> None:
    always = measure(
        generate(replace(SMALL, locality=1.0, predictability=1.0), SHAPE), SHAPE.num_experts
    )
    assert (always.reuse, always.prediction) == (1.0, 1.0)
    never = measure(generate(replace(SMALL, predictability=0.0), SHAPE), SHAPE.num_experts)
    assert never.prediction == 0.0
    blind = measure(
        generate(Dials(skew=0, locality=0, tokens=4000, requests=2), SHAPE), SHAPE.num_experts
    )
    assert blind.reuse == pytest.approx(SHAPE.top_k / SHAPE.num_experts, abs=0.02)
    assert blind.concentration < 0.001


def test_statistics_by_hand() -> None:
    """One layer, a prompt of two tokens that want 0 1 and 0 2, then a token that wants 0 1."""
    experts = np.array([[0, 1], [0, 2], [0, 1]], np.uint16)
    zeros = np.zeros(3, np.int32)
    tokens = np.arange(3, dtype=np.int32)
    phase = np.array([PREFILL, PREFILL, DECODE], np.uint8)
    trace = Trace(
        zeros,
        np.array([0, 0, 1], np.int32),
        phase,
        zeros,
        tokens,
        experts,
        np.ones((3, 2), np.float32),
    )
    statistics = measure(trace, 3)
    assert statistics.reuse == 0.5
    assert statistics.similarity == pytest.approx((2 + 1) / np.sqrt((4 + 1 + 1) * (1 + 1)))
    share = np.array([3, 2, 1]) / 6
    assert statistics.concentration == pytest.approx(1 + (share * np.log(share)).sum() / np.log(3))
    assert statistics.prediction is None
    assert measure(trace.take(np.array([2])), 3).similarity is None
    assert measure(trace.take(np.array([2])), 3).reuse is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("skew=9", "skew is between 0 and 8"),
        ("skew=nan", "skew takes a number, not 'nan'"),
        ("requests=0", "requests and batch are at least 1"),
        ("batch=0", "requests and batch are at least 1"),
        ("seed=-1", "not negative"),
        ("locality", "takes a value of type float, not ''"),
        ("tokens=10,requests=2,prompt=5", "or prompt=4"),
    ],
)
def test_dials_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(BadUsage, match=says):
        parse_dials(text)

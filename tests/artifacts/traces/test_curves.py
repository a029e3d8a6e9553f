"""Curves of one pass over a trace against one real replay per cache size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadInput
from artifacts.shape import Shape
from artifacts.traces.curves import Curves, measure
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.control.build import build_controller
from runtime.control.cache import RESIDENT
from runtime.control.controller import Controller
from runtime.policies import build
from runtime.policies.base import Artefacts, Step
from runtime.policies.presets import Scope, preset
from tests import TRACE

DEMO = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=1)
SMALL = Shape(num_layers=2, num_experts=5, top_k=2, expert_nbytes=1)


def controller(shape: Shape, size: int, uses: str = "passes") -> Controller:
    policies = build(preset("on-demand").texts() | {"eviction": f"lcp:uses={uses}"})
    num_slots = size * shape.num_layers
    return build_controller(
        policies, shape, num_slots=num_slots, scope=Scope.LAYER, window=0, artefacts=Artefacts()
    )


def replayed(
    trace: Trace, shape: Shape, size: int, phases: tuple[int, ...], uses: str = "passes"
) -> tuple[np.ndarray, list[list[set[int]]]]:
    """Hits and requests [2, L] of the counted steps, and by layer what was cached before each of
    them."""
    control = controller(shape, size, uses)
    current = -1
    counted = np.zeros((2, shape.num_layers))
    before = [[] for _ in range(shape.num_layers)]
    for step in trace.steps():
        if step.pass_index != current:
            current = step.pass_index
            control.begin_pass(len(step.experts))
        cached = set(np.flatnonzero(control.cache.layer_states(step.layer) == RESIDENT).tolist())
        wanted = set(step.experts.ravel().tolist())
        if step.phase in phases:
            counted[:, step.layer] += len(wanted & cached), len(wanted)
            before[step.layer].append(cached)
        control.step(
            Step(
                step.pass_index, step.phase, step.layer, step.experts.astype(np.int64), step.weights
            )
        )
    return counted, before


def predicted(
    trace: Trace, shape: Shape, phases: tuple[int, ...]
) -> list[list[list[tuple[list[int], set[int]]]]]:
    """By layer and counted step, for each predicted token: experts by falling probability, and the
    selected ones."""
    by_layer = [[] for _ in range(shape.num_layers)]
    rows: dict[tuple, np.ndarray] = {}
    last: dict[
        int, tuple[int, np.ndarray]
    ] = {}  # by request, pass and prediction of its last token
    for step in trace.steps():
        of_step = []
        for token, experts, ahead, request in zip(
            step.token.tolist(),
            step.experts,
            step.predicted[:, 0],
            step.request.tolist(),
            strict=True,
        ):
            source = rows.get((step.pass_index, request, token, step.layer - 1))
            if step.layer == 0:
                source = last.get(request)
            if source is not None:
                of_step.append((np.argsort(-source, kind="stable").tolist(), set(experts.tolist())))
            rows[step.pass_index, request, token, step.layer] = ahead
        if step.layer == shape.num_layers - 1:
            for request in set(step.request.tolist()):
                request_rows = np.flatnonzero(step.request == request)
                last[request] = step.predicted[request_rows[step.token[request_rows].argmax()], 0]
        if step.phase in phases:
            by_layer[step.layer].append(of_step)
    return by_layer


def slow(trace: Trace, shape: Shape, phases: tuple[int, ...], uses: str = "passes") -> Curves:
    num_layers = shape.num_layers
    num_experts = shape.num_experts
    hit = np.zeros((num_layers, num_experts + 1))
    right = np.zeros((num_layers, num_experts))
    cached = np.zeros((num_layers, num_experts, num_experts + 1))
    by_layer = predicted(trace, shape, phases)
    predictions = np.array([sum(map(len, steps)) for steps in by_layer])
    for layer, steps in enumerate(by_layer):
        for ranked, selected in (pair for step in steps for pair in step):
            right[layer] += [expert in selected for expert in ranked]
    requests = replayed(trace, shape, 1, phases, uses)[0][1]
    for size in range(1, num_experts + 1):
        (hits, _), before = replayed(trace, shape, size, phases, uses)
        hit[:, size] = hits / np.maximum(requests, 1)
        for layer, steps in enumerate(by_layer):
            for held, pairs in zip(before[layer], steps, strict=True):
                for ranked, _ in pairs:
                    cached[layer, :, size] += [expert in held for expert in ranked]
    counts = np.maximum(predictions, 1)
    return Curves(
        hit, right / counts[:, None], cached / counts[:, None, None], requests, predictions
    )


def assert_same(one: Curves, other: Curves) -> None:
    for name in ("hit", "prediction", "prediction_hit", "requests", "predictions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("phases", [(PREFILL, DECODE), (DECODE,)])
def test_as_so_many_replays_say(phases: tuple[int, ...]) -> None:
    """Bit for bit, with prompts that run in waves among them."""
    trace = read_parquet(TRACE)
    trace = trace.take(np.flatnonzero(trace.request < 1))
    assert_same(measure(trace, DEMO, phases=phases), slow(trace, DEMO, phases))


def made(lengths: list[int], seed: int, *, num_requests: int = 1) -> Trace:
    """Passes of so many tokens each, the first a prompt, over two layers; requests take turns."""
    random = np.random.default_rng(seed)
    columns = []
    positions = dict.fromkeys(range(num_requests), 0)
    for number, length in enumerate(lengths):
        request = number % num_requests
        tokens = np.arange(positions[request], positions[request] + length)
        positions[request] += length
        phase = PREFILL if length > 1 else DECODE
        columns += [
            (request, number, phase, layer, token) for layer in range(2) for token in tokens
        ]
    request, number, phase, layer, token = np.array(columns, np.int32).T
    experts = np.stack([random.permutation(5)[:2] for _ in token]).astype(np.uint16)
    predicted = random.random((len(token), 1, 5)).astype(np.float32).round(1)  # with ties
    weights = np.ones(experts.shape, np.float32)
    return Trace(
        request, number, phase.astype(np.uint8), layer, token, experts, weights, predicted=predicted
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.integers(0, 99),
    st.integers(1, 3),
    st.sampled_from(["passes", "tokens"]),
)
@settings(max_examples=60)
def test_small_traces_of_all_kinds(
    lengths: list[int], seed: int, num_requests: int, uses: str
) -> None:
    trace = made(lengths, seed, num_requests=num_requests)
    assert_same(measure(trace, SMALL, uses=uses), slow(trace, SMALL, (PREFILL, DECODE), uses))


@given(st.integers(2, 40), st.integers(0, 99))
@settings(max_examples=30)
def test_a_larger_cache_holds_what_a_smaller_one_does_where_all_that_is_wanted_fits(
    length: int, seed: int
) -> None:
    trace = made([1] * length, seed)
    held = [replayed(trace, SMALL, size, (DECODE,))[1] for size in range(2, 6)]
    for smaller, larger in zip(held, held[1:], strict=False):
        assert all(
            a <= b
            for one, other in zip(smaller, larger, strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_where_it_does_not_fit_a_larger_cache_may_lack_what_a_smaller_one_holds() -> None:
    """The reason why every size is followed. The prompt wants 4 3 2 0 1: three slots take 4 3 2,
    then 0 1 for 2 3; four take 4 3 2 0, then 1 for 0."""
    places = {"pass_": [0, 0, 0, 1], "layer": [0] * 4, "token": [0, 1, 2, 3], "request": [0] * 4}
    columns = {name: np.array(column, np.int32) for name, column in places.items()}
    experts = np.array([[4, 3], [2, 0], [1, 4], [0, 1]], np.uint16)
    phase = np.array([PREFILL] * 3 + [DECODE], np.uint8)
    trace = Trace(
        **columns, phase=phase, experts=experts, weights=np.ones(experts.shape, np.float32)
    )
    shape = Shape(1, 5, 2, 1)
    assert [replayed(trace, shape, size, (DECODE,))[1] for size in (3, 4)] == [
        [[{0, 1, 4}]],
        [[{1, 2, 3, 4}]],
    ]
    curves = measure(trace, shape, phases=(DECODE,))
    assert curves.hit.tolist() == [[0.0, 0.5, 0.5, 1.0, 0.5, 1.0]]
    assert not curves.prediction.any() and curves.predictions.tolist() == [0]


def test_the_first_layer_is_predicted_by_the_last_of_the_pass_before() -> None:
    """Two requests take turns; request 0 is predicted by its own last pass."""
    places = {"pass_": [0, 0, 1, 1, 2, 2], "layer": [0, 1] * 3, "token": [0, 0, 0, 0, 1, 1]}
    places["request"] = [0, 0, 1, 1, 0, 0]
    columns = {name: np.array(column, np.int32) for name, column in places.items()}
    experts = np.array([[0], [1], [1], [1], [2], [0]], np.uint16)
    ahead = np.eye(3, dtype=np.float32)[[1, 2, 0, 0, 0, 1]][:, None]
    trace = Trace(
        **columns,
        phase=np.full(6, DECODE, np.uint8),
        experts=experts,
        weights=np.ones(experts.shape, np.float32),
        predicted=ahead,
    )
    curves = measure(trace, Shape(2, 3, 1, 1))
    assert curves.predictions.tolist() == [1, 3]
    assert curves.prediction[0].tolist() == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(curves.prediction[1, 0], 2 / 3)  # 1 and 0 are right, 0 for 1 is not


def test_layers_that_never_occur_have_no_curves() -> None:
    trace = made([3, 1, 1], 0)
    curves = measure(trace.take(np.flatnonzero(trace.layer == 0)), SMALL)
    assert curves.requests[0] > 0 and curves.requests[1] == 0
    assert not curves.hit[1].any() and curves.predictions.tolist() == [0, 0]


@pytest.mark.parametrize(
    "shape", [Shape(7, 32, 4, 1), Shape(8, 20, 4, 1), Shape(8, 32, 2, 1), Shape(8, 40, 4, 1)]
)
def test_another_models_trace_is_refused(shape: Shape) -> None:
    with pytest.raises(
        BadInput, match="another model's|predicts 32 experts a layer, the model has 40"
    ):
        measure(read_parquet(TRACE), shape)

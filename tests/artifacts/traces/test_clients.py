"""Requests served together: who is computed when, what clients wait for, and that no row is lost or
changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.clients import Clients, clients_of, serve
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import DECODE, PREFILL, Trace

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=1)


def made(*, requests: int = 3, length: int = 5, prompt: int = 2, batch: int = 1) -> Trace:
    dials = Dials(tokens=requests * length, requests=requests, prompt=prompt, batch=batch)
    return generate(dials, SHAPE, detailed=False)


def schedule(trace: Trace) -> list[list[tuple[int, list[int]]]]:
    """Return the requests of each pass, with the positions of their tokens in it."""
    passes = [step for step in trace.steps() if step.layer == 0]
    return [
        [
            (request, step.token[step.request == request].tolist())
            for request in dict.fromkeys(step.request.tolist())
        ]
        for step in passes
    ]


def test_a_single_client_has_the_trace_as_it_was_recorded() -> None:
    trace = made()
    served = serve(trace, Clients(1))
    for before, after in zip(trace.steps(), served.trace.steps(), strict=True):
        assert (before.pass_index, before.phase, before.layer) == (
            after.pass_index,
            after.phase,
            after.layer,
        )
        assert np.array_equal(before.experts, after.experts) and np.array_equal(
            before.token, after.token
        )
    assert served.num_repeated == 0


def test_prompts_wait_for_their_turn_and_are_read_beside_answers() -> None:
    """Two clients, of whom the second is met at the last token of its answer, and three tokens of
    prompts a pass. It ends where a fifth request would begin: three are in the trace, and one was
    met half-way."""
    served = serve(made(prompt=4, length=6), Clients(2, chunk=3))
    assert served.arrived.tolist() == [0, -1, 1, 4]
    assert schedule(served.trace) == [
        [(1, [5]), (0, [0, 1, 2])],
        [(0, [3]), (2, [0, 1])],
        [(0, [4]), (2, [2, 3])],
        [(0, [5]), (2, [4])],
        [(2, [5]), (3, [0, 1, 2])],
    ]
    assert served.trace.phase[served.trace.pass_ == 2].tolist() == [DECODE, DECODE, *[PREFILL] * 4]
    assert served.num_repeated == 1


def test_times_are_those_of_the_passes_that_a_request_waits_for() -> None:
    """A prompt of two tokens read one at a time, then three tokens of its answer, in passes of 1,
    2, 4, 8 and 16 s."""
    served = serve(made(requests=1), Clients(1, chunk=1))
    ends_s = np.cumsum([1.0, 2, 4, 8, 16])
    assert served.first_token_s(ends_s).tolist() == [3.0]
    assert served.each_token_s(ends_s).tolist() == [pytest.approx((4 + 8 + 16) / 3)]
    told = served.summary(ends_s)
    assert told["ttft_ms"] == told["ttft_p95_ms"] == 3000 and told["tokens_per_s"] == pytest.approx(
        4 / 31
    )


@settings(max_examples=40)
@given(
    count=st.integers(1, 6),
    chunk=st.integers(1, 9),
    requests=st.integers(1, 5),
    prompt=st.integers(0, 4),
    batch=st.integers(1, 2),
    seed=st.integers(0, 3),
)
def test_every_token_is_computed_once_and_in_order(
    count: int, chunk: int, requests: int, prompt: int, batch: int, seed: int
) -> None:
    trace = made(requests=requests, prompt=prompt, batch=batch)
    clients = Clients(count, chunk=chunk, seed=seed)
    served = serve(trace, clients)
    again = serve(trace, clients)
    assert np.array_equal(served.trace.experts, again.trace.experts)
    rows = {(r, t, layer): tuple(e) for r, t, layer, e in _rows(trace)}
    order = list(
        dict.fromkeys(trace.request[np.argsort(trace.pass_indices(), kind="stable")].tolist())
    )
    for request, token, layer, experts in _rows(served.trace):
        assert rows[order[request % len(order)], token, layer] == tuple(experts)
    for number, passed in enumerate(schedule(served.trace)):
        assert len(passed) <= count, f"pass {number} has more requests than clients"
    _check_requests(served.trace, served.arrived, count, chunk)
    assert len(served.arrived) >= max(len(order), count)


def _rows(trace: Trace) -> zip:
    return zip(
        trace.request.tolist(),
        trace.token.tolist(),
        trace.layer.tolist(),
        trace.experts.tolist(),
        strict=True,
    )


def _check_requests(trace: Trace, arrived: np.ndarray, count: int, chunk: int) -> None:
    """Tokens follow each other without a gap, from the first unless it was met half-way; prompts
    stay in the chunk."""
    first = trace.layer == 0
    request = trace.request[first]
    token = trace.token[first]
    number = trace.pass_[first]
    for one in np.unique(request).tolist():
        positions = token[request == one]
        assert (np.diff(positions) == 1).all() and (np.diff(number[request == one]) >= 0).all()
        assert arrived[one] < 0 or positions[0] == 0
    of_prompts = np.bincount(number[trace.phase[first] == PREFILL], minlength=number.max() + 1)
    assert of_prompts.max() <= chunk
    assert np.bincount(number[trace.phase[first] != PREFILL], minlength=1).max() <= count


def test_what_cannot_be_served_is_refused() -> None:
    for options in ((0, None), (3, 0), (None, 4)):
        with pytest.raises(BadUsage, match="--clients|--chunk"):
            clients_of(*options)
    assert clients_of(None) is None

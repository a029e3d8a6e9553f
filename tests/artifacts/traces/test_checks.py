"""Traces with rows that contradict each other, repeat or are missing: refused by row, or said to be
incomplete."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadInput
from artifacts.traces.checks import check_rows
from artifacts.traces.parquet import from_table, to_table
from artifacts.traces.trace import DECODE, PREFILL, Trace

E = 6
K = 3


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A complete trace: passes of one or several requests, each with the same tokens in every
    layer."""
    num_layers = draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    far = draw(st.sampled_from([1, 2**29]))  # numbers need not be small
    rows = []
    position = [0, 0]
    for number in range(draw(st.integers(1, 4))):
        lengths = draw(st.sampled_from([(1, 0), (3, 0), (0, 1), (1, 1), (2, 1)]))
        for layer in range(num_layers):
            for request, length in enumerate(lengths):
                rows += [
                    (request * far, number * far, layer, position[request] + token)
                    for token in range(length)
                ]
        position = [before + length for before, length in zip(position, lengths, strict=True)]
    columns = np.array(rows, np.int32).T
    return Trace(
        request=columns[0],
        pass_=columns[1],
        phase=np.where(columns[1] == 0, PREFILL, DECODE).astype(np.uint8),
        layer=columns[2],
        token=columns[3],
        experts=random.permuted(np.tile(np.arange(E), (len(rows), 1)), axis=1)[:, :K].astype(
            np.uint16
        ),
        weights=random.random((len(rows), K), dtype=np.float32) + np.float32(0.01),
    )


def meaning(trace: Trace) -> list:
    """What a replay sees, step by step and token by token."""
    return [
        (step.pass_index, step.phase, step.layer, step.request.tolist(), step.token.tolist())
        + (step.experts.tolist(), step.weights.tolist())
        for step in trace.steps()
    ]


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


NUMBERS = ["request", "pass", "layer", "token"]
LISTS = ["experts", "weights"]
SAFE = [pa.int64(), pa.uint32(), pa.uint64(), pa.float64()]


@st.composite
def damaged(draw: st.DrawFn, table: pa.Table) -> pa.Table:
    """The table with one thing changed that a file of another recorder, or a careless hand, may
    have changed."""
    row = draw(st.integers(0, len(table) - 1))
    other = draw(st.integers(0, len(table) - 1))
    rows = np.arange(len(table))
    name = draw(st.sampled_from([*NUMBERS, *LISTS]))
    values = table[name].to_pylist()
    kind = draw(st.sampled_from(["twice", "lost", "kind", "value", "rank", "places", "none"]))
    if kind == "twice":
        return table.take(np.insert(rows, other, row))
    if kind == "lost":
        return table.take(np.delete(rows, row))
    if kind == "kind" and name in NUMBERS:
        return with_column(table, name, table[name].cast(draw(st.sampled_from(SAFE))))
    if kind == "kind":
        inner = (
            pa.float64()
            if name == "weights"
            else draw(st.sampled_from([pa.int64(), pa.uint8(), pa.float64()]))
        )
        return with_column(
            table,
            name,
            pa.array(values, draw(st.sampled_from([pa.list_(inner), pa.large_list(inner)]))),
        )
    if kind == "places":
        values[row] = None
        return with_column(table, name, pa.array(values))
    if kind == "value":
        strange = draw(st.sampled_from([-1, 2**31, 0.5, float("nan"), "0", True]))
        values = (
            [[strange] * K if name in LISTS else strange] * len(values)
            if isinstance(strange, str | bool)
            else values
        )
        values[row] = [strange, *values[row][1:]] if name in LISTS else strange
        if name == "weights" and strange in (0.5, 2**31):
            return table  # a weight like any other
        return with_column(table, name, pa.array(values))
    if kind == "rank":
        experts = table["experts"].to_pylist()
        experts[row] = draw(
            st.sampled_from([experts[row][:-1], [experts[row][0]] * K, [*experts[row][1:], E]])
        )
        return with_column(table, "experts", pa.array(experts))
    return table


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_trace_is_refused_or_means_the_same(data: st.DataObject) -> None:
    trace = data.draw(traces())
    table = to_table(trace)
    assert from_table(table, num_experts=E).assumed == ()
    try:
        back = from_table(data.draw(damaged(table)), num_experts=E)
    except BadInput as error:
        assert "\n" not in str(error) and any(
            word in str(error) for word in ("row", "not numbers", "no column")
        )
        return
    assert meaning(back) == meaning(trace) or back.assumed or is_nothing_left_of_it(back, trace)


def is_nothing_left_of_it(back: Trace, trace: Trace) -> bool:
    """Whether the row that was lost was all that named its token or its layer: no other row shows
    that it was there."""
    is_alone = trace.num_layers == 1 or len(np.unique(back.layer)) < trace.num_layers
    return is_alone and len(back) == len(trace) - 1


@settings(max_examples=20)
@given(traces(), st.randoms(use_true_random=False))
def test_any_order_is_checked(trace: Trace, random) -> None:
    rows = list(range(len(trace)))
    random.shuffle(rows)
    assert check_rows(trace.take(np.array(rows))) == ()
    again = trace.take(np.array([*rows, rows[0]]))
    with pytest.raises(
        BadInput, match=f"rows 0 and {len(rows)} are both token {trace.token[rows[0]]} of request"
    ):
        check_rows(again)


def test_lost_rows_are_said() -> None:
    """Layers that never occur are another matter: a trace of some layers of a model is complete in
    these."""
    layers = np.repeat([0, 3, 5], 2).astype(np.int32)
    zeros = np.zeros(6, np.int32)
    experts = np.tile(np.array([[1, 2]], np.uint16), (6, 1))
    weights = np.full((6, 2), 0.5, np.float32)
    columns = {"request": zeros, "pass_": zeros, "phase": zeros.astype(np.uint8), "layer": layers}
    trace = Trace(
        **columns, token=np.tile([4, 7], 3).astype(np.int32), experts=experts, weights=weights
    )
    assert check_rows(trace) == ()
    for lost, told in (([2], "1 of 2 tokens have no row"), ([2, 5], "2 of 2 tokens have no row")):
        assert check_rows(trace.take(np.delete(np.arange(6), lost)))[0].startswith(told)
    assert check_rows(trace.take(np.array([1, 3, 5]))) == ()
    layers = np.array([0, 3, 5, 0, 3, 5], np.int32)
    tokens = np.array([4, 4, 4, 7, 7, 8], np.int32)
    assert check_rows(replace(trace, layer=layers, token=tokens))[0].startswith("2 of 3 tokens")


def test_no_weight_is_no_weight() -> None:
    weights = np.array([[0, 0.5], [0.5, 0], [0, 0]], np.float32)
    numbers = np.arange(3, dtype=np.int32)
    same = np.zeros(3, np.int32)
    trace = Trace(
        same,
        numbers,
        same.astype(np.uint8),
        same,
        numbers,
        np.array([[0, 1]] * 3, np.uint16),
        weights,
    )
    with pytest.raises(BadInput, match="row 2 gives no expert a weight above 0"):
        check_rows(trace)
    assert check_rows(trace.take(numbers[:2])) == ()

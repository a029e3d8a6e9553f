"""Traces: the order of their steps, and their round trip through Parquet."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import BadInput, OutOfResources
from artifacts.traces.parquet import from_table, read_parquet, to_table, write_parquet
from artifacts.traces.trace import DECODE, PREFILL, Trace, concatenate


def trace_of(rows, *, num_experts=8, depth=0, phase=DECODE):
    """A trace of (request, pass, layer, token) rows; the experts of row n are n and n + 1 (modulo
    E)."""
    rows = np.array(rows, dtype=np.int32)
    count = np.arange(len(rows))
    random = np.random.default_rng(0)
    return Trace(
        request=rows[:, 0],
        pass_=rows[:, 1],
        phase=np.full(len(rows), phase, dtype=np.uint8),
        layer=rows[:, 2],
        token=rows[:, 3],
        experts=(np.stack([count, count + 1], axis=1) % num_experts).astype(np.uint16),
        weights=random.random((len(rows), 2), dtype=np.float32),
        probabilities=random.random((len(rows), num_experts), dtype=np.float32) if depth else None,
        predicted=random.random((len(rows), depth, num_experts), dtype=np.float32)
        if depth
        else None,
    )


def order_of(trace):
    """[(pass index, layer, [(request, token) of its rows])]"""
    return [
        (
            step.pass_index,
            step.layer,
            list(zip(step.request.tolist(), step.token.tolist(), strict=True)),
        )
        for step in trace.steps()
    ]


def write_table(path, **columns):
    pq.write_table(pa.table({name.rstrip("_"): column for name, column in columns.items()}), path)
    return path


def test_a_batch_is_one_pass():
    rows = [(0, 0, 0, 5), (1, 0, 0, 9), (0, 0, 1, 5), (1, 0, 1, 9), (0, 1, 0, 6), (1, 1, 0, 10)]
    assert order_of(trace_of(rows)) == [
        (0, 0, [(0, 5), (1, 9)]),
        (0, 1, [(0, 5), (1, 9)]),
        (1, 0, [(0, 6), (1, 10)]),
    ]


def test_passes_numbered_anew_for_each_request_are_kept_apart():
    rows = [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 0), (2, 0, 0, 0), (2, 1, 0, 1)]
    assert order_of(trace_of(rows)) == [
        (0, 0, [(0, 0)]),
        (1, 0, [(0, 1)]),
        (2, 0, [(1, 0)]),
        (3, 0, [(2, 0)]),
        (4, 0, [(2, 1)]),
    ]


def test_a_batch_written_layer_by_layer_is_still_one_pass():
    rows = [(r, p, layer, p) for layer in (0, 1) for p in (0, 1) for r in (0, 1)]
    assert [step[:2] for step in order_of(trace_of(rows))] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_passes_run_in_order_of_first_appearance_and_rows_keep_theirs():
    rows = [(0, 7, 1, 2), (0, 7, 0, 2), (0, 7, 1, 0), (0, 3, 0, 3)]
    trace = trace_of(rows)
    assert order_of(trace) == [(0, 0, [(0, 2)]), (0, 1, [(0, 2), (0, 0)]), (1, 0, [(0, 3)])]
    assert [step.experts.tolist() for step in trace.steps()] == [
        [[1, 2]],
        [[0, 1], [2, 3]],
        [[3, 4]],
    ]


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=1, max_size=30))
def test_steps_hold_every_row_once(rows):
    trace = trace_of(rows)
    seen = [(step.pass_index, step.layer) for step in trace.steps()]
    assert seen == sorted(set(seen))
    assert sum(len(step.token) for step in trace.steps()) == len(rows)


def test_a_step_with_any_prefilled_token_is_prefill():
    mixed = concatenate([trace_of([(0, 0, 0, 0)]), trace_of([(1, 0, 0, 0)], phase=PREFILL)])
    assert [step.phase for step in mixed.steps()] == [PREFILL]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_round_trip(tmp_path, depth):
    trace = trace_of(
        [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1)], depth=depth, phase=PREFILL
    )
    write_parquet(trace, tmp_path / "t.parquet")
    back = read_parquet(tmp_path / "t.parquet", num_experts=8)
    assert back.assumed == ()
    assert back.columns().keys() == trace.columns().keys()
    for name, column in trace.columns().items():
        assert np.array_equal(column, back.columns()[name]), name
        assert column.dtype == back.columns()[name].dtype, name
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_missing_columns_are_filled_in_and_said(tmp_path):
    path = write_table(
        tmp_path / "t.parquet",
        pass_=[0, 0, 1],
        layer=[0, 0, 0],
        token=[0, 1, 2],
        experts=[[1, 2, 3, 0]] * 3,
    )
    trace = read_parquet(path)
    assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE]
    assert trace.weights.tolist() == [[0.25] * 4] * 3
    assert [text.split(":")[0] for text in trace.assumed] == [
        "no column request",
        "no column phase",
        "no column weights",
    ]


def test_without_metadata_the_number_of_experts_divides_predictions():
    """As in a store, which keeps no metadata."""
    trace = trace_of([(0, 0, 0, 0), (0, 0, 1, 0)], depth=2)
    table = to_table(trace).replace_schema_metadata()
    np.testing.assert_array_equal(from_table(table, num_experts=8).predicted, trace.predicted)
    with pytest.raises(BadInput, match="metadata"):
        from_table(table.drop_columns("probabilities"))


GOOD = {"pass_": [0, 1], "layer": [0, 0], "token": [0, 1], "experts": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"experts": [[1, 2], [3]]},
            "lists of one length in every row, and has 2 in row 0, 1 in row 1",
        ),
        ({"experts": [[1, 2], None]}, "2 in row 0, 0 in row 1"),
        ({"experts": [[], []]}, "lists of one length"),
        ({"experts": [1, 2]}, "not lists"),
        ({"experts": [[1, 2], [3, None]]}, "column experts has an empty place in row 1"),
        ({"experts": [[1, 2], [3, -4]]}, "column experts, row 1: Integer value -4"),
        ({"experts": [[1, 2], [3, 3]]}, "row 1 selects expert 3 twice"),
        ({"experts": [[1, 2, 1], [3, 4, 5]]}, "row 0 selects expert 1 twice"),
        ({"experts": [[1, 2], [float("nan"), 4]]}, "column experts, row 1: "),
        ({"experts": [[True, False]] * 2}, "column experts holds bool, not numbers"),
        ({"experts": [[1, 2], [3, 8]]}, "row 1 selects expert 8, but a layer has only 8"),
        ({"experts": [["a", "b"], ["c", "d"]]}, "column experts"),
        ({"layer": [0, -1]}, "holds -1 in row 1; it counts from 0"),
        ({"layer": [0, 0.5]}, "column layer, row 1: "),
        ({"layer": [0, 2**31]}, "column layer, row 1: "),
        ({"layer": [0, 2**30]}, "row 1 has a layer 1073741824; no model has more than"),
        ({"layer": ["0", "1"]}, "column layer holds string, not numbers"),
        ({"layer": [0, None]}, "column layer has an empty place in row 1"),
        ({"token": ["x", "y"]}, "column token"),
        ({"weights": [[0.5], [0.5]]}, "2 experts but 1 weights"),
        ({"weights": [[0.5, 0.5], [0.5, float("nan")]]}, "negative or not finite in row 1"),
        ({"weights": [[0.5, 0.5], [0.5, -0.5]]}, "negative or not finite in row 1"),
        ({"weights": [[0.5, 0.5], [0.0, 0.0]]}, "row 1 gives no expert a weight above 0"),
        ({"weights": [["1", "0"]] * 2}, "column weights holds string, not numbers"),
        (
            {"pass_": [0, 0], "token": [3, 3]},
            "rows 0 and 1 are both token 3 of request 0 in layer 0 of pass 0",
        ),
        ({"probabilities": [[0.5] * 4] * 2}, "row 1 selects expert 4, but a layer has only 4"),
        (
            {"probabilities": [[0.5] * 9] * 2},
            "lists of 9, a layer 8 experts: it is another model's",
        ),
        (
            {"phase": ["prefill", "decoding"]},
            "prefill or decode in every row, and does not in row 1",
        ),
        ({"phase": [0, 1]}, "prefill or decode"),
        ({"predicted": [[0.5] * 4] * 2}, "metadata"),
        ({name: [] for name in GOOD}, "no rows"),
    ],
)
def test_an_unusable_trace_is_refused_in_one_line(tmp_path, change, message):
    path = write_table(tmp_path / "t.parquet", **(GOOD | change))
    with pytest.raises(BadInput, match=message) as caught:
        read_parquet(path, num_experts=8)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_column_and_a_foreign_file_are_refused(tmp_path):
    path = write_table(tmp_path / "t.parquet", **{name: GOOD[name] for name in ("pass_", "layer")})
    with pytest.raises(BadInput, match="no column token, experts"):
        read_parquet(path)
    path.write_text("not a Parquet file at all")
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        read_parquet(path)
    with pytest.raises(BadInput, match="no trace file"):
        read_parquet(tmp_path / "none.parquet")


def test_writing_fails_whole(tmp_path, monkeypatch):
    trace = trace_of([(0, 0, 0, 0)])
    path = tmp_path / "t.parquet"
    path.write_text("before")

    def disk_full(table, where, **_):
        where.write_text("half")
        raise OSError("Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(pq, "write_table", disk_full)
    with pytest.raises(OutOfResources, match="no space left"):
        write_parquet(trace, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]
    assert path.read_text() == "before"
    with pytest.raises(BadInput, match="no folder"):
        write_parquet(trace, tmp_path / "none" / "t.parquet")


ROWS = [
    (r, p, layer, t)
    for p, tokens in enumerate(([(0, 0), (0, 1), (1, 0)], [(0, 2), (1, 1)]))
    for layer in (0, 1)
    for r, t in tokens
]


def embedded(rows=ROWS):
    """Requests 0 and 1 prefilled together, then a token of each: four iterations."""
    trace = trace_of(rows)
    iteration = [{(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}[r, p] for r, p, *_ in rows]
    embeddings = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    return replace(trace, iteration=np.array(iteration, np.int32), embeddings=embeddings)


def test_embeddings_go_through_parquet_once_an_iteration(tmp_path):
    trace = embedded()
    assert to_table(trace)["embedding"].null_count == len(trace) - 4
    write_parquet(trace, tmp_path / "t.parquet")
    back = read_parquet(tmp_path / "t.parquet", num_experts=8)
    assert np.array_equal(back.embeddings[back.iteration], trace.embeddings[trace.iteration])
    some = trace.take(np.flatnonzero((trace.request == 1) & (trace.layer == 1)))
    write_parquet(some, tmp_path / "t.parquet")
    back = read_parquet(tmp_path / "t.parquet", num_experts=8)
    assert np.array_equal(
        back.embeddings, trace.embeddings[[1, 3]]
    ) and back.iteration.tolist() == [0, 1]
    both = concatenate([back, trace])
    assert np.array_equal(both.embeddings[both.iteration][2:], trace.embeddings[trace.iteration])


@pytest.mark.parametrize("change", ["none in one iteration", "two in one iteration"])
def test_embeddings_that_do_not_fit_the_rows_are_refused(change):
    table = to_table(embedded())
    lists = table["embedding"].to_pylist()
    lists[0], lists[1] = (None, None) if change.startswith("none") else (lists[0], lists[0])
    at = table.column_names.index("embedding")
    with pytest.raises(BadInput, match="a list in one row of every request in every pass"):
        from_table(table.set_column(at, "embedding", pa.array(lists, pa.list_(pa.float32()))))

"""Logs without borders of requests: FLAME-MoE's Parquet and arrays of router logits."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import BadInput, BadUsage, OutOfResources
from artifacts.importers import flame_moe, router_logits
from artifacts.importers.routing_log import LogOptions, trace_of
from artifacts.traces.trace import DECODE

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 5, 6)).astype(np.float32)  # layers, tokens, experts
TOP_2 = LogOptions(top_k=2)


def layer_file(folder: Path, layer: int, rows: int = 5) -> Path:
    """As published: indices list<int16>, scores list<float16> in falling order."""
    indices = np.argsort(-RNG.normal(size=(rows, 64)), axis=1)[:, :6]
    scores = -np.sort(-RNG.random((rows, 6)), axis=1)
    table = {
        "scores": pa.array(scores.astype(np.float16).tolist(), pa.list_(pa.float16())),
        "indices": pa.array(indices.tolist(), pa.list_(pa.int16())),
    }
    path = folder / f"layer_{layer:02}.parquet"
    pq.write_table(pa.table(table), path)
    return path


def test_the_layers_of_flame_moe_are_one_trace(tmp_path: Path) -> None:
    paths = [layer_file(tmp_path, layer) for layer in (10, 2)]
    trace = trace_of(flame_moe.read(tmp_path, LogOptions(tokens=3)))
    assert (trace.num_layers, trace.top_k, len(trace)) == (2, 6, 6)
    assert (trace.phase == DECODE).all() and len(list(trace.steps())) == 6
    for layer, path in ((1, paths[0]), (0, paths[1])):
        table = pq.read_table(path)
        assert trace.experts[trace.layer == layer].tolist() == table["indices"].to_pylist()[:3]
        assert trace.weights[trace.layer == layer].tolist() == table["scores"].to_pylist()[:3]
    assert "layers 2, 10 of the log are layers 0 to 1 of the trace" in trace.assumed
    assert len(trace_of(flame_moe.read(paths[0], LogOptions()))) == 5


def damaged(folder: Path, what: str) -> Path:
    path = layer_file(folder, 2)
    table = pq.read_table(path)
    if what == "text":
        path.write_text("no Parquet")
    elif what == "column":
        pq.write_table(table.drop_columns("scores"), path)
    elif what == "twice":
        twice = pa.array([[1] * 6] * 5, pa.list_(pa.int16()))
        pq.write_table(table.set_column(1, "indices", twice), path)
    elif what == "negative":
        pq.write_table(
            table.set_column(1, "indices", pa.array([[-1] * 6] * 5, pa.list_(pa.int16()))), path
        )
    elif what == "ragged":
        pq.write_table(
            table.set_column(
                1, "indices", pa.array([[1], [2, 3]] * 2 + [[1]], pa.list_(pa.int16()))
            ),
            path,
        )
    elif what == "shorter":
        layer_file(folder, 3, rows=4)
    elif what == "unnumbered":
        path.rename(folder / "layer_a.parquet")
        layer_file(folder, 3)
    return path.parent


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("text", "layer_02.parquet cannot be read as Parquet"),
        ("column", "layer_02.parquet has no column scores; expected: indices and scores"),
        ("twice", "layer_02.parquet, row 0 has an expert twice"),
        ("negative", "layer_02.parquet: column indices, row 0"),
        ("ragged", "layer_02.parquet: column indices needs lists of one length in every row"),
        ("shorter", "layer_03.parquet has 4 rows"),
        ("unnumbered", "need the number of their layer in their names"),
    ],
)
def test_what_is_no_trace_of_flame_moe(what: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        trace_of(flame_moe.read(damaged(tmp_path, what), LogOptions()))
    assert says in str(refused.value)


def test_a_folder_without_layers_and_one_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"has no file layer_\*.parquet"):
        flame_moe.read(tmp_path, LogOptions())
    layer_file(tmp_path, 2)
    monkeypatch.setattr(flame_moe, "MOST_NBYTES", 100)
    with pytest.raises(OutOfResources, match="give --tokens"):
        flame_moe.read(tmp_path, LogOptions())


@pytest.mark.parametrize("form", ["npy", "npz", "folder", "probabilities"])
def test_logits_in_every_form_are_the_same_trace(form: str, tmp_path: Path) -> None:
    softmax = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=2, keepdims=True)
    path = tmp_path / ("logits.npz" if form == "npz" else "logits.npy")
    if form == "npz":
        np.savez(path, **{f"layer_{layer}": array for layer, array in enumerate(LOGITS)})
    elif form == "folder":
        path = tmp_path
        for layer, array in enumerate(LOGITS):
            np.save(path / f"ffn_moe_logits-{layer}.npy", array)
    else:
        np.save(path, softmax if form == "probabilities" else LOGITS)
    trace = trace_of(router_logits.read(path, TOP_2))
    assert len(trace) == 10 and (trace.phase == DECODE).all()
    for layer in range(2):
        rows = trace.layer == layer
        assert np.allclose(trace.probabilities[rows], softmax[layer], atol=1e-6)
        assert np.array_equal(trace.experts[rows], np.argsort(-LOGITS[layer], axis=1)[:, :2])
        assert np.allclose(
            trace.weights[rows],
            np.take_along_axis(softmax[layer], trace.experts[rows].astype(int), 1),
        )


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.ones(3), "is float64 [3]; expected: numbers [tokens, experts]"),
        (
            np.where(np.arange(12).reshape(4, 3) == 7, np.nan, 1.0),
            "logits.npy, row 2 holds a number that is not finite",
        ),
        (np.array(["a"]), "expected: numbers"),
        (np.array([{}]), "cannot be read as a numpy array"),
    ],
)
def test_what_are_no_logits(array: np.ndarray, says: str, tmp_path: Path) -> None:
    np.save(path := tmp_path / "logits.npy", array, allow_pickle=True)
    with pytest.raises(BadInput) as refused:
        router_logits.read(path, TOP_2)
    assert says in str(refused.value)


def test_archives_that_are_no_layers(tmp_path: Path) -> None:
    np.savez(path := tmp_path / "logits.npz", gate=LOGITS[0])
    with pytest.raises(
        BadInput, match="needs an array for each layer, its number in its name; it has gate"
    ):
        router_logits.read(path, TOP_2)
    np.savez(path, layer_0=LOGITS[0], layer_1=LOGITS[1][:4])
    with pytest.raises(BadInput, match=r"array layer_1 has 4 rows"):
        router_logits.read(path, TOP_2)


@pytest.mark.parametrize("top_k", [None, 7])
def test_logits_do_not_say_how_many_are_selected(top_k: int | None, tmp_path: Path) -> None:
    np.save(path := tmp_path / "logits.npy", LOGITS)
    with pytest.raises(BadUsage, match="give --top-k"):
        router_logits.read(path, LogOptions(top_k=top_k))

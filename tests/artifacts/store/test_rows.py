"""Artefacts survive a round trip through the tables of a store."""

import numpy as np
import pyarrow as pa
import pytest

from artifacts.quantisation.widths import WIDTHS, columns_of
from artifacts.routing.buddies import buddy_lists, buddy_table
from artifacts.routing.coactivation import conditional
from artifacts.routing.similarity import Similarity
from artifacts.store.rows import (
    activation_matrices,
    buddy_matrices,
    buddy_rows,
    coactivation_matrices,
    curve_matrices,
    curve_rows,
    entropy_percentiles,
    quant_loss_matrices,
    similarity_matrices,
    similarity_rows,
    split_columns,
    split_rows,
)
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store


@pytest.fixture
def stored(tmp_path):
    """A function that sends a table through a store."""

    def through(name, columns):
        with Store.open(tmp_path / "moe.duckdb") as store:
            run = RunInfo("test", None, utc_now(), 0.0, versions={})
            table = columns if isinstance(columns, pa.Table) else pa.table(columns)
            return store.read(name, store.write_run(run, {name: table}))

    return through


def test_activations_by_phase(stored):
    rows = {
        "phase": ["prefill", "prefill", "decode"],
        "layer": [0, 1, 1],
        "expert": [2, 0, 2],
        "count": [5, 2**40, 7],
        "weight": [0.5, 1.5, 2.5],
    }
    back = activation_matrices(stored("activations", rows), 2, 3)
    assert {phase: counts.tolist() for phase, (counts, _) in back.items()} == {
        "prefill": [[0, 0, 5], [2**40, 0, 0]],
        "decode": [[0, 0, 0], [0, 0, 7]],
    }
    assert back["decode"][1].tolist() == [[0, 0, 0], [0, 0, 2.5]]


def test_coactivations(stored):
    rows = {"layer": [1, 0], "i": [0, 2], "j": [1, 0], "count": [3, 9], "weight": [0.25, 1.0]}
    pairs, weighted = coactivation_matrices(stored("coactivations", rows), 2, 3)
    assert (pairs[1, 0, 1], pairs[0, 2, 0], pairs.sum()) == (3, 9, 12)
    assert (weighted[1, 0, 1], weighted[0, 2, 0], weighted.sum()) == (0.25, 1.0, 1.25)


def test_losses_by_width_are_nan_where_there_is_none(stored):
    keys = {
        name: np.array(values, np.uint16)
        for name, values in (("layer", [1, 0, 0]), ("expert", [2, 0, 1]))
    }
    rows = keys | {
        "bits": np.array([1, 4, 8], np.uint16),
        "mse": [0.5, 0.25, 0.1],
        "relative": [0.1, 0.2, 0.3],
    }
    rows |= {
        "samples": [70, 3, 5],
        "basis": ["own", "layer", "own"],
        "gated": [3.0, 0.0, 1.0],
        "energy": [9.0] * 3,
    }
    losses = quant_loss_matrices(stored("quant_loss", rows), 2, 3)
    assert losses.keys() == {"mse", "relative", "gated", "energy"}
    of_1, of_4, of_8 = columns_of([1, 4, 8])
    assert losses["mse"][0, 1, of_8] == 0.1
    assert (
        losses["mse"][1, 2, of_1],
        losses["relative"][0, 0, of_4],
        losses["gated"][1, 2, of_1],
    ) == (0.5, 0.2, 3.0)
    assert all(np.isnan(values).sum() == 2 * 3 * len(WIDTHS) - 3 for values in losses.values())


def test_entropy_comes_in_the_order_of_layers(stored):
    percentiles = np.random.default_rng(0).random((2, 101)).astype(np.float32)
    rows = {"layer": [1, 0], "percentiles": list(percentiles), "histogram": [[1], [2]]}
    assert np.array_equal(entropy_percentiles(stored("entropy", rows)), percentiles[::-1])


def test_buddies(stored):
    pairs = np.random.default_rng(0).integers(0, 4, (2, 6, 6))
    pairs[1, 3] = 0
    q = np.stack([conditional(layer) for layer in pairs])
    lists = [buddy_lists(layer, 0.9, 4) for layer in q]
    rows = stored("buddies", buddy_rows(lists, q))
    buddies, back = buddy_matrices(rows, 2, 6)
    for layer in range(2):
        assert np.array_equal(buddies[layer], buddy_table(lists[layer]))
        for pivot, names in enumerate(lists[layer]):
            assert back[layer, pivot].tolist() == [
                *q[layer, pivot, names],
                *[0.0] * (4 - len(names)),
            ]
    last_of_first = len(lists[0][0]) - 1
    assert rows["cumulative"][last_of_first].as_py() == pytest.approx(q[0, 0, lists[0][0]].sum())


def test_no_buddies_at_all(stored):
    buddies, _ = buddy_matrices(
        stored("buddies", buddy_rows([[[], []]], np.zeros((1, 2, 2)))), 1, 2
    )
    assert buddies.tolist() == [[[-1], [-1]]]


def test_similarity_comes_back_as_it_was(stored):
    random = np.random.default_rng(0)
    cosine = random.uniform(-1, 1, (2, 4, 4))
    loss = random.random((2, 4, 4))
    diagonal = np.arange(4)
    cosine[:, diagonal, diagonal] = 1
    loss[:, diagonal, diagonal] = 0
    before = Similarity(cosine, loss, random.random((2, 4)), random.integers(0, 9, (2, 4)))
    rows = stored("similarity", similarity_rows(before))
    assert rows.num_rows == 2 * 4 * 3
    after = similarity_matrices(rows, 2, 4)
    assert all(
        np.array_equal(getattr(before, name), getattr(after, name)) for name in Similarity.__slots__
    )


def test_curves_come_back(stored):
    random = np.random.default_rng(3)
    curves = random.random((3, 6)), random.random((3, 5)), random.random((3, 5, 6))
    rows = stored("curves", curve_rows(*curves))
    assert rows.num_rows == sum(curve.size for curve in curves)
    for read, curve in zip(curve_matrices(rows, 3, 5), curves, strict=True):
        np.testing.assert_array_equal(read, curve)


def test_splits_come_back(stored):
    split = (
        np.array([1.5, 4.0, 0.01]),
        np.array([0.0, 1e-3, 2.0]),
        np.array([0.5, 1.0, 0.01]),
        np.array([3, 4, 1]),
    )
    for read, column in zip(
        split_columns(stored("splits", split_rows(*split))), split, strict=True
    ):
        np.testing.assert_array_equal(read, column)

"""Artefacts that are loaded from a store for policies."""

from pathlib import Path

import numpy as np

from artifacts.hardware.machines import HERE
from artifacts.routing.similarity import Similarity
from artifacts.shape import Shape
from artifacts.splits.slots_by_layer import loads_on_demand
from artifacts.splits.solve import Latencies
from artifacts.store.rows import buddy_rows, curve_rows, similarity_rows, split_rows
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from runtime.session.artefacts import load_artefacts

SHAPE = Shape(num_layers=2, num_experts=3, top_k=2, expert_nbytes=100)
MODEL = ModelInfo("small", "d" * 64, "olmoe", SHAPE)
PARAMETERS = {
    "budget_bytes": 300,
    "latencies": {
        "attention_s": 1.0,
        "moe_s": 2.0,
        "head_s": 3.0,
        "load_s": 4.0,
    },  # older runs have no latency_s
    "solver": "greedy",
    "zeta": 0.1,
    "link": "disk",
}


def run(command: str, **parameters: object) -> RunInfo:
    return RunInfo(command, MODEL.model_id, utc_now(), 0.0, parameters=parameters)


def test_splits_and_loads_come_from_the_newest_split(tmp_path: Path) -> None:
    hit = np.tile([0.0, 0.2, 0.5, 1.0], (2, 1))
    prediction = np.tile([0.5, 0.3, 0.2], (2, 1))
    curves = (hit, prediction, np.broadcast_to(hit[:, None], (2, 3, 4)).copy())
    answer = (np.array([1.0, 2.0]), np.zeros(2), np.array([0.5, 1.0]), np.array([2, 2]))
    with Store.open(tmp_path / "moe.duckdb") as store:
        store.add_model(MODEL)
        assert load_artefacts(store, MODEL.model_id, SHAPE).loads is None
        store.write_run(
            run("split", **PARAMETERS),
            {"curves": curve_rows(*curves), "splits": split_rows(*answer)},
        )
        loaded = load_artefacts(store, MODEL.model_id, SHAPE)
        assert load_artefacts(store, MODEL.model_id, SHAPE, wants={"splits"}).loads is None
    np.testing.assert_allclose(loaded.loads, loads_on_demand(*curves, 2))
    [split] = loaded.splits
    assert (split.latencies, split.solver, split.zeta) == (
        Latencies(1.0, 2.0, 3.0, 4.0),
        "greedy",
        0.1,
    )
    assert split.fits(HERE, "disk") and split.fits(HERE, None) and not split.fits(HERE, "pinned")
    assert (split.made_for, split.source) == ("here over disk", "run 1 of moe.duckdb")


def test_a_layer_is_as_sensitive_as_its_used_experts(tmp_path: Path) -> None:
    """Layer 0 changes by 16 over five uses, which the later layer doubles; layer 1 by 2."""
    left_out = np.array([[1.0, 4.0, 9.0], [2.0, 2.0, 2.0]])
    samples = np.array([[3, 1, 0], [5, 5, 5]])
    square = np.zeros((2, 3, 3))
    with Store.open(tmp_path / "moe.duckdb") as store:
        store.add_model(MODEL)
        store.write_run(
            run("sample"),
            {"similarity": similarity_rows(Similarity(square, square, left_out, samples))},
        )
        sensitivity = load_artefacts(
            store, MODEL.model_id, SHAPE, wants={"sensitivity"}
        ).sensitivity
        assert load_artefacts(store, MODEL.model_id, SHAPE, wants=()).sensitivity is None
    expected = np.array([3.2 * 2, 2.0])  # an expert without samples counts as one use
    np.testing.assert_allclose(sensitivity, expected / expected.mean())


def test_lists_by_coactivation_are_found_beneath_newer_ones(tmp_path: Path) -> None:
    q = np.full((2, 3, 3), 0.5)
    lists = {"coactivation": [[1], [2], [0]], "loss": [[2], [0], [1]]}
    with Store.open(tmp_path / "moe.duckdb") as store:
        store.add_model(MODEL)
        assert load_artefacts(store, MODEL.model_id, SHAPE).coactivated is None
        for metric, layer in lists.items():
            store.write_run(
                run("build-buddies", metric=metric), {"buddies": buddy_rows([layer] * 2, q)}
            )
        loaded = load_artefacts(store, MODEL.model_id, SHAPE)
        assert load_artefacts(store, MODEL.model_id, SHAPE, wants={"buddies"}).coactivated is None
    assert {name: origin.run for name, origin in loaded.origins.items()} == {
        "buddies": 2,
        "coactivated": 1,
    }
    assert loaded.origins["coactivated"].note == ""
    assert loaded.origins["buddies"].note == (
        "buddies: run 2 of build-buddies is used because it is newer than run 1 (metric loss, "
        "there coactivation); to use that one make it again"
    )
    assert loaded.buddies[..., 0].tolist() == [[2, 0, 1]] * 2
    assert (
        loaded.coactivated[0][..., 0].tolist() == [[1, 2, 0]] * 2
        and (loaded.coactivated[1] == 0.5).all()
    )

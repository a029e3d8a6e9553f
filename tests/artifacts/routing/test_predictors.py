"""Fitted predictors survive a round trip through a store, or are refused."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from artifacts.errors import BadInput, Incompatible
from artifacts.routing.predictors import (
    RECORDED,
    Predictors,
    check_reach,
    predictor_rows,
    predictors_of,
    projection,
)
from artifacts.shape import Shape
from artifacts.store.predictors import load_predictors
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store

SHAPE = Shape(num_layers=3, num_experts=4, top_k=2, expert_nbytes=10)
HIDDEN = 5
FEATURES = 2


def random_predictors(distance: int = 2) -> Predictors:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, distance, HIDDEN + FEATURES + 1, 4)).astype(np.float32)
    return Predictors(rng.random(3).astype(np.float32), weights, FEATURES, seed=7)


def rows_of(predictors: Predictors) -> pa.Table:
    size = predictors.weights.shape[:2]
    numbers = ("recall", "next_gate_recall", "frequent_recall")
    columns = {"target": np.full(size, "logits"), **{name: np.zeros(size) for name in numbers}}
    return predictor_rows(predictors, columns | {"samples": np.full(size, 9)})


def test_through_a_store_and_back(tmp_path: Path) -> None:
    model = ModelInfo("m", "f" * 64, "olmoe", SHAPE)
    wrote = random_predictors()
    info = RunInfo(
        "build-predictor", model.model_id, utc_now(), 1.0, seed=7, parameters={"features": FEATURES}
    )
    with Store.open(tmp_path / "moe.duckdb") as store:
        store.add_model(model)
        assert load_predictors(store, model.model_id, SHAPE) is None
        store.write_run(info, {"predictors": rows_of(wrote)})
        read = load_predictors(store, model.model_id, SHAPE)
    assert np.array_equal(read.weights, wrote.weights) and np.array_equal(read.scale, wrote.scale)
    assert (read.seed, read.num_features, read.distance, read.hidden) == (7, FEATURES, 2, HIDDEN)


def test_rows_may_come_in_any_order() -> None:
    wrote = random_predictors()
    shuffled = rows_of(wrote).take(np.random.default_rng(1).permutation(6))
    assert np.array_equal(
        predictors_of(shuffled, SHAPE, num_features=FEATURES, seed=7).weights, wrote.weights
    )


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4], [0, 0, 2, 3, 4, 5]])
def test_what_is_not_whole_is_refused(kept: list[int]) -> None:
    with pytest.raises(BadInput, match="moectl build-predictor"):
        predictors_of(rows_of(random_predictors()).take(kept), SHAPE, num_features=FEATURES, seed=7)


def test_what_is_not_finite_is_refused() -> None:
    predictors = random_predictors()
    predictors.weights[1, 1, 0, 0] = np.nan
    with pytest.raises(BadInput, match="not finite"):
        predictors_of(rows_of(predictors), SHAPE, num_features=FEATURES, seed=7)


def test_how_far_they_look() -> None:
    check_reach(random_predictors(), 2)
    check_reach(RECORDED, 6)
    with pytest.raises(
        Incompatible, match="2 layers ahead, not 3: run `moectl build-predictor --distance 3`"
    ):
        check_reach(random_predictors(), 3)


def test_the_projection_follows_from_its_seed() -> None:
    matrix, shift = projection(64, 32, 3)
    again = projection(64, 32, 3)
    other = projection(64, 32, 4)
    assert np.array_equal(matrix, again[0]) and np.array_equal(shift, again[1])
    assert not np.array_equal(matrix, other[0])
    assert matrix.std() * np.sqrt(64) == pytest.approx(1.5, rel=0.1)

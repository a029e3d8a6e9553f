"""Presets survive a round trip through the store."""

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.errors import Incompatible
from artifacts.shape import Shape
from artifacts.store.presets import TABLE, StoredPreset, stored_presets, to_rows
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from runtime.session.presets import find_presets, tuned_presets
from runtime.session.session import Settings

SHAPE = Shape(2, 4, 2, 96)
MODELS = [ModelInfo("a", "a1" * 32, "olmoe", SHAPE), ModelInfo("b", "b2" * 32, "olmoe", SHAPE)]
ONE = StoredPreset(
    "tuned",
    routing="standard",
    prefetch="next_gate",
    eviction="lfu:decay=0.95",
    miss="qstar:ratio=0.312",
    residency="uniform",
    scope="global",
    budget="25%",
    machine="here",
    max_loss=0.0,
    tpot_ms=12.5,
)


def write(path: Path, model: ModelInfo, *presets: StoredPreset) -> None:
    with Store.open(path) as store:
        store.add_model(model)
        store.write_run(RunInfo("tune", model.model_id, utc_now(), 1.0), {TABLE: to_rows(presets)})


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    write(path, MODELS[0], ONE)
    with Store.open(path, read_only=True) as store:
        [kept] = stored_presets(store)
    assert (kept.preset, kept.run_id, kept.model_id) == (ONE, 1, MODELS[0].model_id)


def test_it_runs_under_its_name_and_says_what_it_was_tuned_for(tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    write(path, MODELS[0], ONE)
    presets = find_presets(["tuned", "on-demand", "nobody"], path)
    assert presets.keys() == {"tuned"}
    settings = Settings(presets["tuned"], {"miss": "near"})
    assert settings.texts() == {
        "routing": "standard",
        "prefetch": "next_gate",
        "eviction": "lfu:decay=0.95",
        "miss": "near",
        "residency": "uniform",
    }
    assert (
        presets["tuned"].tuned_for == "25% on here (run 1)" and presets["tuned"].scope == "global"
    )


def test_the_newest_of_the_models_own(tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    for model, miss in ((MODELS[0], "fetch"), (MODELS[0], "near"), (MODELS[1], "cold")):
        write(path, model, replace(ONE, miss=miss))
    assert find_presets(["tuned"], path)["tuned"].miss == "cold"
    assert find_presets(["tuned"], path, model_id=MODELS[0].model_id)["tuned"].miss == "near"
    assert [one.miss for one in tuned_presets(path)] == ["near", "cold"]


def test_one_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    write(path, MODELS[1], ONE)
    with pytest.raises(
        Incompatible, match="preset tuned was tuned for b, another model: run `moectl tune`"
    ):
        find_presets(["tuned"], path, model_id=MODELS[0].model_id)
    assert (
        find_presets(["tuned"], tmp_path / "none.duckdb") == {} == find_presets(["on-demand"], path)
    )

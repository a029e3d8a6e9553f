"""Hardware profiles: their rows, and the choice of the profile that fits a model."""

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.errors import BadInput, Incompatible
from artifacts.hardware.profile import COMMAND, HardwareProfile, Spread, from_rows, to_rows
from artifacts.shape import Shape
from artifacts.store.hardware_profiles import profile_for, stored_profile
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from tests.helpers.measured import made

SHAPE = Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=100)
MODEL = ModelInfo("demo", "a" * 64, "olmoe", SHAPE)


def test_a_spread_is_the_median_and_the_distance_of_quartiles() -> None:
    assert Spread.of([1, 2, 3, 4, 100]) == Spread(3, 2, 5)
    assert Spread.of([1, 3]) == Spread(2, 1, 2)


def test_rows_give_the_profile_back() -> None:
    profile = made()
    rows = to_rows(profile)
    assert rows.num_rows == len(profile.compute) + len(profile.loads) + len(profile.near)
    assert from_rows(rows, profile.conditions) == profile
    decode = rows.to_pylist()[0]
    assert (decode["tokens"], decode["attention_s"], decode["moe_s"], decode["head_s"]) == (
        1,
        10.0,
        12.0,
        3.0,
    )
    assert decode["near_s"] is decode["expert_load_s"] is decode["link"] is None


def test_a_link_that_was_not_measured_is_refused_with_those_that_were() -> None:
    assert made().load().link == "disk"
    with pytest.raises(
        BadInput,
        match="no link 5GB/s, only disk, ram: run `moectl profile --hardware` --link 5GB/s",
    ):
        made().load("5GB/s")


def test_near_memory_by_width() -> None:
    assert [one.tokens for one in made().near_at(16)] == [1, 16]
    assert made().near_at(3) == []


def test_a_machine_is_the_same_whatever_else_runs_on_it() -> None:
    profile = made()
    busy, other = (
        replace(profile, conditions=dict(profile.conditions) | change)
        for change in ({"load": 9.0}, {"cores": 64})
    )
    assert profile.machine == busy.machine != other.machine


def write(store: Store, model: ModelInfo, profile: HardwareProfile) -> None:
    store.add_model(model)
    info = RunInfo(COMMAND, model.model_id, utc_now(), 1.0, parameters=dict(profile.conditions))
    store.write_run(info, {"hardware": to_rows(profile)})


def test_the_newest_profile_of_the_model_is_read_back(tmp_path: Path) -> None:
    older = made()
    newer = made(scale=2.0)
    with Store.open(tmp_path / "moe.duckdb") as store:
        assert stored_profile(store, MODEL.model_id) is None
        for profile in (older, newer):
            write(store, MODEL, profile)
        assert stored_profile(store, MODEL.model_id) == newer
        assert profile_for(store, SHAPE, name="demo") == newer
        assert stored_profile(store, "b" * 16) is None


def test_a_profile_of_another_shape_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path / "moe.duckdb") as store:
        store.add_model(MODEL)
        with pytest.raises(
            Incompatible,
            match="no hardware profile, and .* run `moectl profile --hardware` with big",
        ):
            profile_for(store, replace(SHAPE, expert_nbytes=7), name="big")
        write(store, MODEL, made())
        with pytest.raises(Incompatible, match="hardware profiles of models of other shapes only"):
            profile_for(store, replace(SHAPE, expert_nbytes=7), name="big")


def test_no_time_is_below_nothing() -> None:
    """Otherwise a profile of a busy machine would be refused when it is read."""
    assert Spread.of([-3.0, -2.0, 1.0]) == Spread(0.0, 2.0, 3)
    assert Spread.of([1.0, 2.0, 3.0]).median == 2.0

"""What presets require of a store, before a model is opened."""

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.errors import BadUsage, Incompatible
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import add_run
from runtime.policies import build
from runtime.policies.presets import preset, presets
from runtime.session.presets import check_stored
from tests.helpers import artefacts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artefacts.fill(tmp_path_factory.mktemp("stored") / "moe.duckdb")


def check(name: str, store: Path, *, model: str = "small", **others: object) -> None:
    check_stored(build(preset(name).texts()), store, name=model, **others)


def test_a_preset_finds_what_it_requires(whole: Path) -> None:
    for name, one in presets().items():
        if not one.waits_for:
            check(name, whole)
    check("on-demand", whole, base=4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("buddymoe", "the miss policy needs buddies, .*moectl build-buddies"),
        ("shadow", "the residency policy needs replicas, .*moectl quantize"),
        ("foresight", "needs predictors, .*moectl build-predictor"),
        ("fmoe", "needs maps, .*moectl build-maps"),
    ],
)
def test_what_is_missing_is_said_with_its_command(
    whole: Path, tmp_path: Path, name: str, said: str
) -> None:
    add_run(empty := tmp_path / "moe.duckdb", RunInfo("bench", None, utc_now(), 1.0), {})
    for store in (empty, tmp_path / "none.duckdb"):
        with pytest.raises(Incompatible, match=said):
            check(name, store)
    check(name, whole, model="unknown to the store")


def test_another_models_artefacts_are_not_this_ones(whole: Path, tmp_path: Path) -> None:
    (store := tmp_path / "moe.duckdb").write_bytes(whole.read_bytes())
    other = replace(artefacts.MODEL, name="other", fingerprint="e" * 64)
    add_run(store, RunInfo("bench", other.model_id, utc_now(), 1.0), {}, model=other)
    with pytest.raises(Incompatible, match="needs buddies"):
        check("buddymoe", store, model="other")
    check("fmoe", store, model="other", learns=True)
    with pytest.raises(Incompatible, match="--base 4 takes stored replicas"):
        check("on-demand", store, model="other", base=4)


def test_tuned_is_what_tune_makes() -> None:
    with pytest.raises(
        BadUsage, match="there is no preset tuned in the store: `moectl tune` makes it"
    ):
        preset("tuned")

"""Which model and which text a command uses: the bundled one by its name or by default, with a hint
where the store suggests another; and paths that do not exist."""

from pathlib import Path

import pytest

from artifacts.errors import BadUsage
from artifacts.modelshapes.known import model_shape
from artifacts.shape import Shape
from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from moectl.bundled import also_held, as_named, demo_model
from moectl.cli import main
from tests.helpers.said import problems


def holding(path: Path, *names: str) -> Path:
    with Store.open(path) as store:
        for digit, name in enumerate(names):
            store.add_model(ModelInfo(name, f"{digit}" * 64, "olmoe", Shape(2, 4, 2, 1000)))
    return path


def test_whoever_names_no_model_hears_of_the_one_that_the_store_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = holding(tmp_path / "mine.duckdb", "my-model")
    Path("my-model").mkdir()
    assert main(["run", "--store", str(store), "--json"]) == 2  # without a prompt
    told = capfd.readouterr().err.splitlines()
    assert told[
        0
    ] == f"moectl: no model is named, so it is the bundled one; {store} also holds my-model: " + (
        "name it after `run` to mean it"
    )
    for arguments in (["my-model", "--store", str(store)], ["bundled", "--store", str(store)], []):
        assert main(["run", *arguments, "--json"]) == 2
        assert capfd.readouterr().err.count("\n") == 1, arguments


def test_the_bundled_model_is_no_other(tmp_path: Path) -> None:
    elsewhere = "/elsewhere/site-packages/moectl/demo"
    assert also_held(holding(tmp_path / "own.duckdb", str(demo_model()), elsewhere)) == ""
    (tmp_path / "broken.duckdb").write_text("no store")
    assert also_held(tmp_path / "broken.duckdb") == ""


def test_bundled_is_a_name_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (as_named("bundled"), as_named(None), as_named("mine")) == (None, None, "mine")
    Path("bundled").mkdir()
    assert as_named("bundled") == "bundled"


def test_a_path_that_leads_nowhere_is_told_as_one() -> None:
    with pytest.raises(
        BadUsage, match="there is no ~/models/none: give a folder with a config.json"
    ):
        model_shape("~/models/none")


@pytest.mark.parametrize("verb", ["profile", "build-maps", "build-predictor", "quantize", "bench"])
def test_text_that_is_not_there_is_told_before_a_model_is_opened(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("no-model").mkdir()
    assert main([verb, "no-model", "--data", "notes.txt"]) == 3
    assert problems(capfd.readouterr().err).startswith("moectl: no data at 'notes.txt'")

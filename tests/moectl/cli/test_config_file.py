"""moectl.toml: where defaults come from, and which one wins."""

from pathlib import Path

import pytest
from typer.main import get_command

from artifacts.errors import BadInput, BadUsage
from moectl.cli import app, main
from moectl.cli.config_file import configured
from moectl.shared.defaults import default_store
from moectl.shared.stores import check_store

PLAN = get_command(app).commands["plan"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "moectl").mkdir(parents=True)
    return tmp_path


def test_the_folder_takes_precedence_over_the_user_and_a_table_over_all(folder: Path) -> None:
    users = folder / "config" / "moectl" / "moectl.toml"
    users.write_text('machine = "rtx4090"\nram = "64GB"\nport = 1\n[plan]\nvram = "8GB"\n')
    (folder / "moectl.toml").write_text('ram = "32GB"\n[plan]\nmachine = "rtx5070"\n')
    assert configured("plan", PLAN) == {"machine": "rtx5070", "ram": "32GB", "vram": "8GB"}


def test_what_is_typed_takes_precedence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "moectl.toml").write_text('[plan]\nmachine = "no-machine"\n')
    assert main(["plan", "gpt-oss-20b"]) == 2
    assert "no-machine" in capsys.readouterr().err
    assert main(["plan", "gpt-oss-20b", "--machine", "rtx4090"]) == 0


def test_the_store_is_the_nearest_that_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed, of the environment, of the folder's file, of the user's, and where none is named."""
    monkeypatch.setenv("MOECTL_STORE", "of-environment")
    (folder / "moectl.toml").write_text('store = "of-folder"\n')
    users = folder / "config" / "moectl" / "moectl.toml"
    users.write_text('store = "of-user"\n')
    data = folder / "data" / "moectl"
    monkeypatch.setenv("XDG_DATA_HOME", str(data.parent))
    missing = ["--store", "typed"]

    def named() -> str:
        assert main(["inspect", *missing]) == 3
        return capsys.readouterr().err.partition("no store ")[2].partition(";")[0]

    assert named() == missing.pop()
    missing.clear()
    assert named() == "of-environment"
    monkeypatch.delenv("MOECTL_STORE")
    for path, name in ((folder / "moectl.toml", "of-folder"), (users, "of-user")):
        assert named() == name
        path.unlink()
    assert named() == f"{data}/moe.duckdb"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(folder))
    assert named() == f"{folder}/.local/share/moectl/moe.duckdb"


def test_the_data_folder_is_made_and_said_once_and_a_store_here_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MOECTL_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    place = default_store()
    check_store(place)
    assert str(place) in capsys.readouterr().err and place.parent.is_dir()
    check_store(place)
    assert capsys.readouterr().err == ""
    (folder / "moe.duckdb").touch()  # as older versions made it
    assert default_store() == Path("moe.duckdb")


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("[plan]\nvrm = 1\n", BadUsage, r"\[plan\] names vrm"),
        ("[pln]\n", BadUsage, "no command"),
        ("plan = [", BadInput, "as TOML"),
    ],
)
def test_what_cannot_be_used_is_told(
    folder: Path, text: str, error: type[Exception], told: str
) -> None:
    (folder / "moectl.toml").write_text(text)
    with pytest.raises(error, match=told):
        configured("plan", PLAN)

"""moectl.toml: where defaults come from, and which one wins."""

from pathlib import Path

import pytest
from typer.main import get_command

from artifacts.errors import BadInput, BadUsage
from moectl.cli import app
from moectl.cli.config_file import configured

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
    from moectl.cli import main

    (folder / "moectl.toml").write_text('[plan]\nmachine = "no-machine"\n')
    assert main(["plan", "gpt-oss-20b"]) == 2
    assert "no-machine" in capsys.readouterr().err
    assert main(["plan", "gpt-oss-20b", "--machine", "rtx4090"]) == 0


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

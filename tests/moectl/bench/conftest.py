"""A small model, a whole bench, and the command as a function."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from moectl.cli import main
from tests.conftest import Checkpoint
from tests.helpers.bench import SAME, Benched, write_text
from tests.moectl.conftest import Said


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small model; the working folder holds a text."""
    monkeypatch.chdir(tmp_path)
    write_text()
    return str(checkpoint("olmoe"))


@pytest.fixture(scope="module")
def ran(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """The JSON of a whole bench, and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("ran")
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.chdir(folder)
        write_text()
        assert main(["bench", str(checkpoint("olmoe")), *SAME, "--json"]) == 0
    return json.loads(said.getvalue()), folder


@pytest.fixture
def benched(said: Said) -> Benched:
    """`benched(*options)`: the JSON of `moectl bench`."""
    return lambda *options: said("bench", *options)

"""The same command on other threads, or in another time zone, language, folder and home: the same
content.

Of replicas made by one process and by several, byte for byte:
tests/profilers/quantise/test_replicas.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from artifacts.quantisation.replica_file import replica_root
from artifacts.store.store import Store
from moectl.cli import main
from tests import ROOT
from tests.conftest import Checkpoint
from tools.torments.content_hash import content_hash

pytestmark = pytest.mark.slow

TEXT = ["--data", "text.txt"]
COMMANDS = [
    ["profile", "the model", *TEXT, "--tokens", "192", "--length", "32", "--trace"],
    ["build-buddies"],
    ["build-maps", "the model", *TEXT, "--tokens", "96", "--capacity", "12", "--distance", "1"],
    [
        "quantize",
        "the model",
        *TEXT,
        "--samples",
        "4",
        "--length",
        "32",
        "--recipe",
        "refined",
        "--bits",
        "2",
    ],
    ["split", "--machine", "5gbps", "--budget", "50%"],
]
EACH = """
import sys
from moectl.cli import main
from moectl.shared.terminal import progress

progress.WAIT_S = 600.0  # a slow machine tells of phases that last
sys.exit(max(main(line.split('|')) for line in sys.argv[1:]))
"""


def furnished(folder: Path, model: Path) -> Path:
    """A folder with the inputs of the commands: a text, and the model by a link."""
    lines = [
        f"Line {line}: {line * line} sheep and a {'very ' * (line % 5)}old dog.\n"
        for line in range(40)
    ]
    (folder / "text.txt").write_text("".join(lines))
    (folder / "the model").symlink_to(model)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:
    """The store of the first run."""
    folder = furnished(tmp_path_factory.mktemp("first"), checkpoint("olmoe"))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for command in COMMANDS:
            assert main(command) == 0, command
    return folder / "moe.duckdb"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def said(path: Path) -> list[tuple[str, str]]:
    with Store.open(path, read_only=True) as store:
        return [(run.info.command, content_hash(store, run.run_id)) for run in store.runs()]


def files(path: Path) -> dict[str, bytes]:
    root = replica_root(path)
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*.safetensors")}


def integers(path: Path, table: str) -> pa.Table:
    with Store.open(path, read_only=True) as store:
        rows = store.read(table, 1)
    return rows.select([field.name for field in rows.schema if pa.types.is_integer(field.type)])


def test_another_number_of_threads_counts_the_same(
    first: Path,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_threads: None,
) -> None:
    monkeypatch.chdir(furnished(tmp_path, checkpoint("olmoe")))
    assert main([*COMMANDS[0], "--threads", "2"]) == 0
    assert torch.get_num_threads() == 2
    for table in ("activations", "coactivations", "traces"):
        counted = integers(tmp_path / "moe.duckdb", table)
        assert counted.num_rows and counted.equals(integers(first, table)), table


def test_another_place_time_language_and_home(
    first: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Folders with spaces and letters beyond ASCII, a home that is a file, hashes in another order,
    and text that is ASCII unless a program says otherwise."""
    place = tmp_path / "a füll disk" / "моє"
    place.mkdir(parents=True)
    furnished(place, checkpoint("olmoe"))
    (home := tmp_path / "home").touch()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XDG_", "HF_HOME", "LC_"))
    }
    other = {
        "TZ": "Pacific/Kiritimati",
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    other |= {"HOME": str(home), "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    lines = ["|".join(command) for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", EACH, *lines], cwd=place, env=kept | other, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(said(first)) >= len(COMMANDS) and said(place / "moe.duckdb") == said(first)
    assert files(place / "moe.duckdb") == files(first) != {}

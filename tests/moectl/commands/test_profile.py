"""`moectl profile` and `moectl merge`, also interrupted and killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from artifacts.store.store import Store
from moectl.cli import main
from tests import ROOT
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow

TABLES = ("activations", "coactivations", "entropy", "traces")
OPTIONS = (
    "--data",
    "text.txt",
    "--tokens",
    "1200",
    "--length",
    "32",
    "--prefill",
    "8",
    "--batch",
    "2",
    "--trace",
)


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint; commands run in the test's own folder, with a text in it."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f"Line {line}: {line * line} sheep, {line % 7} goats and a {'very ' * (line % 5)}old dog.\n"
        for line in range(40)
    ]
    Path("text.txt").write_text("".join(lines))
    return str(checkpoint("olmoe"))


def profile_json(capfd: pytest.CaptureFixture[str], model: str, *options: str) -> dict:
    assert main(["profile", model, *OPTIONS, *options, "--json"]) == 0
    said = capfd.readouterr()
    assert said.err == "" and said.out.count("\n") == 1
    return json.loads(said.out)


def rows(store: str) -> dict[str, pa.Table]:
    """Return all rows of the newest profile in a store."""
    with Store.open(store, read_only=True) as opened:
        run = opened.latest_run("profile")
        return {table: opened.read(table, run.run_id) for table in TABLES}


def names() -> set[str]:
    return {path.name for path in Path.cwd().iterdir()}


def test_what_is_said_of_a_profile(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = profile_json(capfd, model)
    assert (said["run"], said["tokens"], said["resumed_batches"]) == (1, 1200, 0)
    assert [layer["layer"] for layer in said["layers"]] == [0, 1]
    for layer in said["layers"]:
        assert 2 <= layer["experts_used"] <= 8
        assert 0 < layer["evenness_of_use"] <= 1
        assert 0.25 <= layer["share_of_the_busiest_quarter"] <= 1
        assert 0 < layer["median_token_entropy"] <= 1
    assert names() == {"text.txt", "moe.duckdb"}
    assert main(["profile", model, *OPTIONS]) == 0
    table = capfd.readouterr().out
    assert "Routing profile" in table and "run 2: 1,200 tokens in" in table


def test_merged_shards_are_the_profile(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    profile_json(capfd, model, "--store", "whole.duckdb")
    for shard in ("2/2", "1/2"):
        profile_json(capfd, model, "--shard", shard, "--store", f"{shard[0]}.duckdb")
    assert main(["merge", "2.duckdb", "1.duckdb", "--store", "merged.duckdb", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"] == 1200
    merged = rows("merged.duckdb")
    whole = rows("whole.duckdb")
    assert all(merged[table].equals(whole[table]) for table in TABLES)
    assert main(["merge", "2.duckdb", "--store", "half.duckdb"]) == 3
    assert capfd.readouterr().err.startswith(
        "moectl: shards 1/2 of this profile are in none of the stores"
    )
    assert not Path("half.duckdb").exists()


# Saves after every batch instead of every few seconds, so that there is soon something to resume
# from.
EAGER = (
    "import sys\n"
    "from moectl.cli import main\n"
    "from profilers.routing import profile\n"
    "profile._KEEP_EVERY_S = 0\n"
    "sys.exit(main(sys.argv[1:]))"
)


def test_stopped_half_way_the_same_command_goes_on(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # The link is so slow that a batch takes a tenth of a second; the numbers do not depend on it.
    slow = subprocess.Popen(
        [sys.executable, "-c", EAGER, "profile", model, *OPTIONS, "--link", "1MB/s"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 60
    while not list(Path.cwd().glob("*/state.npz")) and time.monotonic() < deadline_s:
        assert slow.poll() is None, slow.communicate()
        time.sleep(0.02)
    time.sleep(0.1)
    slow.send_signal(signal.SIGINT)
    out, err = slow.communicate(timeout=20)
    assert out == ""
    assert slow.returncode == 130 and err.count("\n") == 1
    assert err.startswith(
        "moectl: interrupted: batches that were counted are kept; to go on: moectl profile "
    )
    left = names() - {"text.txt"}
    assert len(left) == 1 and left.pop().startswith("moe.duckdb.profile-")
    assert profile_json(capfd, model)["resumed_batches"] > 0
    assert names() == {"text.txt", "moe.duckdb"}
    assert profile_json(capfd, model, "--store", "whole.duckdb")["resumed_batches"] == 0
    resumed = rows("moe.duckdb")
    whole = rows("whole.duckdb")
    assert all(resumed[table].equals(whole[table]) for table in TABLES)

"""`moectl inspect precision` as a user runs it."""

import json
from pathlib import Path

import pytest

from artifacts.store.store import Store
from moectl.cli import main
from tests.conftest import Checkpoint
from tools.lab import price_precision

pytestmark = pytest.mark.slow

QUANTIZE = [
    "--data",
    "text.txt",
    "--samples",
    "24",
    "--length",
    "32",
    "--recipe",
    "refined",
    "--jobs",
    "1",
]
AVERAGES = (3.0, 1.5)
PRICE = ["--data", "text.txt", "--tokens", "60", "--draws", "2", "--threads", "1"]


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small model; commands run in a folder with a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(price_precision, "AVERAGES", AVERAGES)
    Path("text.txt").write_text(
        "".join(f"Line {line}: {line * line} sheep and an old dog.\n" for line in range(20))
    )
    return str(checkpoint("olmoe"))


def failed(capfd: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """Return the error line of a command that fails."""
    capfd.readouterr()
    assert main(["inspect", "precision", *arguments]) == code
    said = capfd.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


def test_what_is_priced_is_said_and_stored(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", model, *QUANTIZE]) == 0
    capfd.readouterr()
    assert main(["inspect", "precision", model, *PRICE, "--json"]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    priced = json.loads(said.out)
    rows = priced["rows"]
    assert (priced["run"], priced["perplexity"] > 1) == (
        2,
        True,
    ) and "60 tokens of text.txt" in priced["conditions"]
    assert [(row["avg_bits"], row["assignment"]) for row in rows] == [
        (bits, "uniform") for bits in (4, 3, 2, 1)
    ] + [(average, name) for average in AVERAGES for name in ("mixed", "prefix", "random")]
    assert [row["kl"] for row in rows[:4]] == sorted(row["kl"] for row in rows[:4])
    for row in rows:
        assert 0 < row["share"] < 1 and 0 < row["top1_agreement"] <= 1 and row["kl"] > 0
        assert row["lowest"] <= row["perplexity_ratio"] <= row["highest"]
    assert main(["inspect", "precision", model, *PRICE]) == 0
    out = capfd.readouterr().out
    assert "Held-out text at few bits" in out and "run 3: 60 tokens" in out
    with Store.open("moe.duckdb", read_only=True) as store:
        run = store.run(2)
        bench = store.read("bench", 2).to_pylist()
    assert run.info.command == "precision" and run.info.tokens == 60 and run.info.data == "text.txt"
    assert len(bench) == 4 + 4 * len(AVERAGES) and {row["mode"] for row in bench} == {"precision"}
    assert bench[1]["preset"] == "uniform-bits --residency shadow:bits=3,slots=no"
    assert bench[1]["peak_fast_bytes"] == rows[1]["nbytes"] == int(bench[1]["budget"])
    assert (
        bench[1]["perplexity_ratio"] == rows[1]["perplexity_ratio"] and bench[1]["tpot_ms"] is None
    )
    assert bench[7]["preset"].endswith("shadow:bits=random,slots=no,seed=1")


def test_what_is_stored_can_be_run(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The preset that a row names can be given to `moectl run`."""
    assert main(["quantize", model, *QUANTIZE]) == 0
    assert main(["inspect", "precision", model, *PRICE]) == 0
    with Store.open("moe.duckdb", read_only=True) as store:
        row = store.read("bench", 2).to_pylist()[-1]
    capfd.readouterr()
    options = [
        "--preset",
        *row["preset"].split(),
        "--budget",
        row["budget"],
        "--max-new-tokens",
        "2",
        "--threads",
        "1",
    ]
    assert main(["run", model, "--prompt", "An old", *options, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["receipt"]["fast_bytes"] == row["peak_fast_bytes"]


def test_what_cannot_be_priced(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "run `moectl quantize`" in failed(capfd, model, *PRICE, code=5)
    assert not Path("moe.duckdb").exists()
    assert main(["quantize", model, *QUANTIZE, "--bits", "2,4"]) == 0
    assert "needs replicas of 1 bits" in failed(capfd, model, *PRICE, code=5)
    assert "not the bundled model" in failed(capfd, *PRICE, code=5)
    assert main(["quantize", model, *QUANTIZE]) == 0
    assert "no data at 'nowhere.txt'" in failed(
        capfd, model, *PRICE, "--data", "nowhere.txt", code=3
    )
    Path("short.txt").write_text("a")
    assert "no document of two tokens" in failed(
        capfd, model, *PRICE, "--data", "short.txt", code=3
    )
    for view in (["--heatmap"], ["--layer", "1"], ["--run", "1"]):
        assert "leave out --run, --layer, --heatmap" in failed(capfd, model, *PRICE, *view, code=2)
    with Store.open("moe.duckdb", read_only=True) as store:
        assert {run.info.command for run in store.runs()} == {"quantize"}

"""`moectl inspect substitution` as a user runs it."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow

POLICIES = [
    "zero",
    "random_resident",
    "best_resident",
    "coactivation",
    "weighted",
    "output",
    "loss",
]
PROFILE = ["--data", "text.txt", "--tokens", "300", "--length", "30", "--threads", "1"]
PRICE = ["--data", "text.txt", "--tokens", "60", "--draws", "2", "--threads", "1"]


@pytest.fixture
def model(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> str:
    """A small model and its profile; commands run in a folder with a text and the store."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(
        "".join(f"Line {line}: {line * line} sheep and an old dog.\n" for line in range(20))
    )
    folder = str(checkpoint("olmoe"))
    assert main(["profile", folder, *PROFILE, "--samples", "50"]) == 0
    capfd.readouterr()
    return folder


def test_every_policy_under_every_limit(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = Path("moe.duckdb").read_bytes()
    arguments = ["inspect", "substitution", model, *PRICE, "--shares", "1,0.5"]
    assert main([*arguments, "--json"]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    priced = json.loads(said.out)
    rows = priced["rows"]
    assert priced["perplexity"] > 1 and "60 tokens of text.txt" in priced["conditions"]
    assert [row["policy"] for row in rows] == POLICIES * 8
    assert list(dict.fromkeys((row["resident"], row["limits"]) for row in rows)) == [
        (share, limits)
        for share in (1.0, 0.5)
        for limits in ("none", "rho 1", "gates", "gates, rho 1")
    ]
    assert all(row["perplexity_ratio"] == 1 and row["absent"] == 0 for row in rows[:28])
    for row in rows[28:]:
        assert 0 < row["replaced"] <= row["absent"] or row["limits"].startswith("gates")
        assert row["lowest"] <= row["perplexity_ratio"] <= row["highest"]
    assert main(arguments) == 0
    out = capfd.readouterr().out
    assert "Perplexity over the full model's" in out and "Share of ranks replaced" in out
    assert Path("moe.duckdb").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--heatmap"], 2, "leave out --layer and --heatmap"),
        (["--shares", "0.5,x"], 2, "are not numbers"),
        (["--shares", "0,0.5"], 2, "above 0 and at most 1"),
        (["--shares", "0.01"], 2, "leaves 0 of 8 experts"),
        (["--data", "nowhere.txt"], 3, "no data at 'nowhere.txt'"),
        (["--store", "none.duckdb"], 3, "there is no store none.duckdb"),
    ],
)
def test_what_cannot_be_priced(
    model: str, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["inspect", "substitution", model, *PRICE, *arguments]) == code
    said = capfd.readouterr()
    assert not said.out and said.err.count("\n") == 1 and message in said.err


def test_another_model_and_a_profile_without_similarity(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "substitution", *PRICE]) == 5
    assert "not the bundled model" in capfd.readouterr().err
    assert main(["profile", model, *PROFILE, "--no-similarity"]) == 0
    capfd.readouterr()
    assert main(["inspect", "substitution", model, *PRICE]) == 5
    assert "was profiled without similarity" in capfd.readouterr().err


def test_other_names_read_no_model(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "runs", model]) == 2
    assert "inspect runs reads no model" in capfd.readouterr().err

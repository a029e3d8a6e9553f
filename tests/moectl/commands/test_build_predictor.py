"""`moectl build-predictor`, and runs and replays with the predictors."""

import json
from pathlib import Path

import pytest

from artifacts.traces.parquet import read_parquet
from moectl.cli import main
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow

OPTIONS = (
    "--data",
    "text.txt",
    "--tokens",
    "600",
    "--length",
    "24",
    "--batch",
    "2",
    "--features",
    "8",
)
RUN = (
    "--prompt",
    "Line",
    "--greedy",
    "--max-new-tokens",
    "6",
    "--budget",
    "50%",
    "--window",
    "64KiB",
)


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint of two layers; commands run in the test's own folder, with a text in it."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(
        "".join(f"Line {line}: {line * line} sheep.\n" for line in range(40))
    )
    return str(checkpoint("olmoe"))


def said(capfd: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capfd.readouterr().out)


def test_fit_run_and_replay(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["build-predictor", model, *OPTIONS, "--distance", "2", "--json"]) == 0
    built = said(capfd)
    assert built["tokens"] == 600 and 0 < built["tested_tokens"] < 300
    assert [(row["distance"], row["target_in"]) for row in built["distances"]] == [
        (1, "this pass"),
        (1, "next pass"),
        (2, "next pass"),
    ]
    assert len(built["layers"]) == 4 and all(0 <= row["learned"] <= 1 for row in built["layers"])
    for options in ([], ["--layer", "1"], ["--heatmap"]):
        assert main(["inspect", "predictors", *options]) == 0
        assert "predictors" in capfd.readouterr().out or not options
    assert (
        main(["run", model, *RUN, "--preset", "promoe", "--trace", "trace.parquet", "--json"]) == 0
    )
    live = said(capfd)
    assert (
        live["receipt"]["policies"]["prefetch"] == "learned"
        and live["counters"]["prefetch_bytes"] > 0
    )
    assert live["receipt"]["predictors"] == {"distance": 1, "bytes": 2 * 8 * (32 + 8 + 1) * 4}
    trace = read_parquet("trace.parquet")
    assert trace.learned.shape[1] == 1 and trace.predicted is None
    replayed = [
        "simulate",
        "--trace",
        "trace.parquet",
        "--preset",
        "promoe",
        "--budget",
        "50%",
        "--json",
    ]
    assert main(replayed) == 0
    assert said(capfd)["counters"]["requests"] == live["counters"]["requests"]
    assert main([*replayed, "--prefetch", "learned:distance=2"]) == 3
    assert "moectl run --prefetch learned:distance=2 --trace FILE" in capfd.readouterr().err


def test_a_profile_keeps_what_was_foreseen(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    profile = [
        "profile",
        model,
        *OPTIONS[:-2],
        "--prefill",
        "8",
        "--trace",
        "--no-similarity",
        "--distance",
        "2",
    ]
    assert main([*profile, "--json"]) == 0
    assert main(["simulate", "--prefetch", "next_gate:distance=2", "--budget", "50%"]) == 0
    capfd.readouterr()
    assert main(["simulate", "--prefetch", "learned", "--budget", "50%"]) == 3
    assert "moectl run --prefetch learned --trace FILE" in capfd.readouterr().err
    assert main(["build-predictor", model, *OPTIONS, "--distance", "1", "--json"]) == 0
    assert main([*profile, "--json"]) == 0
    capfd.readouterr()
    assert main(["simulate", "--prefetch", "learned", "--budget", "50%", "--json"]) == 0
    assert said(capfd)["counters"]["requests"] > 0


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--distance", "3"), 2, "the distance must be 1 to 2, the model's MoE layers, not 3"),
        (("--distance", "1", "--tokens", "30"), 3, "too few"),
        (("--distance", "1", "--data", "nowhere.txt"), 3, "no data at 'nowhere.txt'"),
        (("--distance", "1", "--store", "nowhere/moe.duckdb"), 3, "nowhere"),
    ],
)
def test_bad_input(
    options: tuple[str, ...], code: int, says: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["build-predictor", model, *OPTIONS, *options]) == code
    heard = capfd.readouterr()
    assert heard.out == "" and heard.err.startswith("moectl: ") and heard.err.count("\n") == 1
    assert says in heard.err
    assert [path.name for path in Path.cwd().iterdir()] == ["text.txt"]


def test_who_has_no_predictors_is_told(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, *RUN, "--preset", "promoe"]) == 5
    assert (
        "the prefetch policy needs predictors" in (heard := capfd.readouterr().err)
        and "build-predictor" in heard
    )
    assert main(["build-predictor", model, *OPTIONS, "--distance", "1", "--json"]) == 0
    capfd.readouterr()
    assert main(["run", model, *RUN, "--prefetch", "learned:distance=2"]) == 5
    assert "run `moectl build-predictor --distance 2`" in capfd.readouterr().err

"""`moectl tune` as a user runs it: picks are verified, stored and used by other commands; bad input
is refused."""

import itertools
import json
from pathlib import Path

import pytest

from artifacts.store.store import Store
from moectl.cli import main
from moectl.shared.terminal import progress
from tests.conftest import Checkpoint
from tests.moectl.conftest import Said

pytestmark = pytest.mark.slow

FEW = [
    "--data",
    "text.jsonl",
    "--held-out",
    "text.jsonl",
    "--tokens",
    "36",
    "--length",
    "12",
    "--rounds",
    "1",
]
FEW += ["--candidates", "3", "--threads", "1", "--budget", "50%"]
LINK = ["--link", "5MB/s"]


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small model; the working folder holds a text."""
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"text": f"{number} sheep and an old dog by the gate"}) for number in range(8)
    ]
    Path("text.jsonl").write_text("\n".join(lines))
    return str(checkpoint("olmoe"))


def test_answers_are_kept_and_other_commands_use_them(model: str, said: Said) -> None:
    """Without replicas and a profile in the store the lossless pick is the only one."""
    found = said("tune", model, *FEW, *LINK, "--name", "mine")
    assert [pick["name"] for pick in found["picks"]] == ["mine-lossless", "mine"]
    assert "moectl profile" in found["why"]
    best = found["picks"][0]
    assert (
        best["tried"]["is_lossless"]
        and best["quality"]["loss"] == 0
        and best["quality"]["top1"] == 1
    )
    assert best["live"]["to_full"] > 0 and {"full", "on-demand", "near"} <= found["live"].keys()
    assert "assumed" in found["receipt"] and found["receipt"]["seed"] == 0
    policies = best["tried"]["combination"]

    with Store.open("moe.duckdb", read_only=True) as store:
        assert {run.info.command for run in store.runs()} == {"trace", "tune"}
        [kept, _] = store.read("presets", found["run"]).to_pylist()
    assert kept == kept | policies | {
        "name": "mine-lossless",
        "budget": "50%",
        "machine": "here, 5MB/s",
        "max_loss": 0,
    }

    ran = said(
        "run", model, "--preset", "mine", "--prompt", "a dog", "--max-new-tokens", "4", "--greedy"
    )
    assert ran["receipt"]["preset"] == "mine"
    assert ran["receipt"]["tuned_for"] == f"50% on here, 5MB/s (run {found['run']})"
    assert ran["receipt"]["scope"] == policies["scope"]
    row = next(row for row in said("inspect", "presets")["rows"] if row["preset"] == "mine")
    assert row["eviction"] == policies["eviction"] and row["tuned_for"].startswith("50%")
    replayed = said("simulate", "--preset", "mine", "--budget", "50%", "--machine", "5gbps")
    assert replayed["receipt"]["preset"] == "mine" and "50%" in replayed["receipt"]["tuned_for"]
    options = [
        "--data",
        "text.jsonl",
        "--tokens",
        "12",
        "--length",
        "12",
        "--rounds",
        "1",
        "--budgets",
        "50%",
    ]
    benched = said(
        "bench", model, *options, "--presets", "mine", "--links", "5MB/s", "--threads", "1"
    )
    assert "mine" in {row["preset"] for row in benched["rows"] if not row["why"]}
    benched = said("bench", model, "--simulate", "--presets", "mine", "--budgets", "50%")
    assert "mine" in {row["preset"] for row in benched["rows"] if not row["why"]}


def test_a_table_and_a_plot_and_no_other_model_runs_by_it(
    model: str,
    checkpoint: Checkpoint,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("other.jsonl").write_text(Path("text.jsonl").read_text().replace("dog", "goat"))
    options = ["--scaled-to", "rtx3090-pcie4", "--max-loss", "0", "--check-data", "other.jsonl"]
    monkeypatch.setattr(progress, "WAIT_S", 0.0)
    assert main(["tune", model, *FEW, *options]) == 0
    out, told = capfd.readouterr()
    phases = [line.partition(" s  ")[2] for line in told.splitlines()]
    assert (
        phases[0] == "1/10 opening the model" and "6/10 searching" in phases and len(phases) == 10
    )
    assert f"{phases[-1].partition(' ')[2]} " in out, "the receipt has the seconds of each"
    for part in (
        "Tuned: 50%",
        "Live, beside each other",
        "Pareto front",
        "other.jsonl",
        "link ",
        "Receipt",
    ):
        assert part in out
    assert "in the proportions of rtx3090-pcie4" in out and " ms" not in out.partition("Receipt")[0]
    assert "left out for want" not in out
    assert f"moectl run {model} --preset tuned" in " ".join(out.split())
    with Store.open("moe.duckdb", read_only=True) as store:
        assert not any(run.info.data == "other.jsonl" for run in store.runs()), (
            "the next search would be on it"
        )
    assert main(["run", str(checkpoint("mixtral")), "--preset", "tuned", "--prompt", "a"]) == 5
    assert "was tuned for" in capfd.readouterr().err


def test_minutes_bind_all_of_it(model: str, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a second passes at each look at it: of all phases the least is done, and all
    is told."""
    now = itertools.count()
    monkeypatch.setattr(progress, "perf_counter", lambda: float(next(now)))
    options = [one for one in FEW if one not in ("--candidates", "3")]
    found = said("tune", model, *options, *LINK, "--minutes", "0.01")
    left_out = " ".join(found["receipt"]["left out for want of time"])
    for what in (
        "of policies",
        "of the trace",
        "the held-out text",
        "what errors cost",
        "replays",
        "live rounds",
    ):
        assert what in left_out
    assert found["live"].keys() >= {"full", "tuned-lossless"} and found["checks"] == []
    assert found["picks"][0]["quality"] is None
    with Store.open("moe.duckdb", read_only=True) as store:
        assert [run.info.command for run in store.runs()] == ["tune"], (
            "a trace cut short is not kept"
        )


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--max-loss", "-1%"], 2, "--max-loss"),
        (["--max-loss", "much"], 2, "--max-loss"),
        (["--scaled-to", "abacus"], 2, "abacus"),
        (["--scaled-to", "a100-pcie4", "--link", "5GB/s"], 2, "leave out --link"),
        (["--budget", "much"], 2, "much"),
        (["--minutes", "0"], 2, "--minutes"),
        (["--name", "full"], 2, "is a preset of moectl"),
        (["--name", "No Name"], 2, "is no name"),
        (["--data", "nowhere.txt"], 3, "nowhere.txt"),
        (["--experts", "fast"], 2, "fast"),
    ],
)
def test_bad_input(
    options: list[str], code: int, why: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    known = [
        one
        for pair in zip(FEW[::2], FEW[1::2], strict=True)
        if pair[0] not in options
        for one in pair
    ]
    assert main(["tune", model, *known, *options]) == code
    err = capfd.readouterr().err
    assert why in err and err.count("\n") == 1


def test_a_short_name_is_looked_for_on_the_hub(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "mixtral-8x7b"]) == 3
    err = capfd.readouterr().err
    assert "`hf download mistralai/Mixtral-8x7B-Instruct-v0.1`" in err and err.count("\n") == 1

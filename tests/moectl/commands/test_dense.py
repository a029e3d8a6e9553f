"""`--dense` from the command line: what `run`, `bench`, `plan` and `simulate` print, and what is
refused."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.conftest import Checkpoint
from tests.helpers.said import problems
from tests.moectl.conftest import Said

pytestmark = pytest.mark.slow

PROMPT = [
    "--prompt",
    "a dog",
    "--max-new-tokens",
    "6",
    "--greedy",
    "--ignore-eos",
    "--threads",
    "1",
]
TEXT = ["--data", "text.jsonl", "--tokens", "24", "--length", "12"]
FEW = ["--rounds", "1", "--threads", "1", "--presets", "full", "--budgets", "50%"]


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"text": f"{number} sheep and an old dog by the gate"}) for number in range(8)
    ]
    Path("text.jsonl").write_text("\n".join(lines))
    return str(checkpoint("olmoe"))


def test_a_run_says_its_width_and_bytes(model: str, said: Said) -> None:
    plain = said("run", model, *PROMPT)
    ran = said("run", model, "--dense", "4", *PROMPT)
    assert len(ran["token_ids"]) == 6 and plain["receipt"]["dense"].keys() == {"bytes"}
    assert ran["receipt"]["dense"]["bits"] == 4
    assert ran["receipt"]["dense"]["bytes"] < plain["receipt"]["dense"]["bytes"]
    assert ran["receipt"]["expert_bytes"] == plain["receipt"]["expert_bytes"]


def test_a_bench_says_what_the_width_loses(model: str, said: Said) -> None:
    found = said("bench", model, "--dense", "4", *TEXT, *FEW)
    rows = {row["preset"]: row for row in found["rows"] if not row["why"]}
    assert (rows["full"]["kl"], rows["full"]["top1_agreement"]) == (pytest.approx(0, abs=1e-6), 1)
    [note] = [note for note in found["notes"] if note.startswith("the base")]
    assert "linear layers besides experts and routers have 4 bits; quality is against it" in note
    assert "(KL 0.0000" not in note and "dense weights of 4 bits" in found["conditions"]
    plain = said("bench", model, *TEXT, *FEW)
    assert not any(note.startswith("the base") for note in plain["notes"])
    runs, others = ({row["run"] for row in one["rows"] if row["run"]} for one in (plain, found))
    assert runs and others and runs.isdisjoint(others)


def test_a_simulation_takes_a_gpu_to_dequantise_them(model: str, said: Said) -> None:
    few = ["--model", "olmoe-1b-7b", "--synthetic", "tokens=400", "--budget", "25%"]
    plain = said("simulate", *few)
    dense = said("simulate", *few, "--dense", "8")
    assert dense["receipt"]["dense_bits"] == 8 and plain["receipt"]["dense_bits"] is None
    assert any("dequantises them at each use" in note for note in dense["receipt"]["assumed"])
    assert dense["counters"]["misses"] == plain["counters"]["misses"] > 0
    assert dense["rows"][0]["tpot_ms"] > plain["rows"][0]["tpot_ms"]


def test_a_plan_counts_their_bytes(model: str, said: Said) -> None:
    asked = ["plan", "olmoe-1b-7b", "--vram", "8GB"]
    plain = said(*asked)
    dense = said(*asked, "--dense", "4")
    own, few = (one["memory"]["weights_nbytes"] for one in (plain, dense))
    linear = 16 * 4 * 2048 * 2048 + 50304 * 2048  # attention and head
    assert own - few == 2 * linear - linear // 32 * 18
    assert dense["memory"]["share"] > plain["memory"]["share"] and dense["dense_bits"] == 4
    assert dense["memory"]["stored_weights_nbytes"] == plain["memory"]["stored_weights_nbytes"]
    assert dense["next"][0].endswith("--dense 4 --simulate: what to expect of each preset")
    assert any("dequantises them at each use" in note for note in dense["assumed"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["run", "MODEL", "--dense", "3", *PROMPT],
            "--dense 3 is no width: give 8 or 4, or leave it out",
        ),
        (["bench", "MODEL", "--dense", "16"], "--dense 16 is no width"),
        (["bench", "MODEL", "--dense", "8", "--peers", "all"], "leave out --base and --dense"),
        (["plan", "olmoe-1b-7b", "--vram", "8GB", "--dense", "2"], "--dense 2 is no width"),
        (["simulate", "--dense", "0", "--synthetic", "tokens=400"], "--dense 0 is no width"),
        (
            ["simulate", "--dense", "8", "--synthetic", "tokens=400", "--machine", "here"],
            "a hardware profile is of dense weights as published; name another --machine",
        ),
    ],
)
def test_bad_input(
    options: list[str], why: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main([model if option == "MODEL" else option for option in options]) == 2
    err = capfd.readouterr().err
    assert why in err and problems(err).count("\n") == 1

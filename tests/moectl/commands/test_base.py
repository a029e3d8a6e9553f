"""`--base 4` from the command line: what `run`, `bench`, `simulate` and `tune` print, and what is
refused."""

import json
from pathlib import Path

import pytest

from artifacts.store.store import Store
from moectl.cli import main
from tests.conftest import Checkpoint
from tests.helpers.said import problems
from tests.moectl.conftest import Said

pytestmark = pytest.mark.slow

TEXT = [
    "--data",
    "text.jsonl",
    "--tokens",
    "24",
    "--length",
    "12",
    "--rounds",
    "1",
    "--threads",
    "1",
]
PROMPT = ["--prompt", "a dog", "--max-new-tokens", "6", "--greedy", "--ignore-eos"]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a store with the replicas of a small model."""
    folder = tmp_path_factory.mktemp("base")
    lines = [
        json.dumps({"text": f"{number} sheep and an old dog by the gate"}) for number in range(8)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines))
    where = ["--data", str(folder / "text.jsonl"), "--store", str(folder / "moe.duckdb")]
    little = ["--samples", "4", "--length", "12", "--jobs", "1", "--recipe", "plain"]
    assert main(["quantize", str(checkpoint("olmoe")), *where, *little]) == 0
    return folder


@pytest.fixture
def model(folder: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    return str(checkpoint("olmoe"))


def test_a_run_and_its_replay(model: str, said: Said, tmp_path: Path) -> None:
    """Every expert is computed at 4 bits, a quarter of the slots takes a quarter of those bytes;
    counters agree."""
    trace = str(tmp_path / "trace.parquet")
    whole = said("run", model, "--base", "4", "--preset", "full", *PROMPT)
    loading = ("--preset", "on-demand", "--budget", "50%", *PROMPT)
    ran = said("run", model, "--base", "4", *loading, "--trace", trace)
    plain = said("run", model, *loading)
    assert ran["token_ids"] == whole["token_ids"]
    receipt = ran["receipt"]
    assert receipt["base_bits"] == 4 and plain["receipt"]["base_bits"] == 16
    assert receipt["slots"] == plain["receipt"]["slots"]
    assert receipt["expert_bytes"] < plain["receipt"]["expert_bytes"] / 2
    assert receipt["replicas"]["kernel"].startswith("numba")
    assert ran["counters"]["demand_bytes"] == ran["counters"]["misses"] * receipt["expert_bytes"]

    with Store.open(Path("moe.duckdb"), read_only=True) as store:
        rows = store.read(
            "replicas", store.latest_run("quantize", store.models()[0].model_id).run_id
        ).to_pylist()
    assert receipt["expert_bytes"] == pytest.approx(
        max(row["nbytes"] for row in rows if row["bits"] == 4), abs=15
    )

    replayed = said(
        "simulate", "--trace", trace, "--model", model, "--base", "4", "--budget", "50%"
    )
    names = ("requests", "hits", "misses", "evictions")
    assert [replayed["counters"][name] for name in names] == [
        ran["counters"][name] for name in names
    ]
    assert replayed["receipt"]["base_bits"] == 4
    assert any(
        "the base: replicas as large as in groups of 128" in note
        for note in replayed["receipt"]["assumed"]
    )


def test_a_bench_is_against_the_base_and_says_what_that_loses(model: str, said: Said) -> None:
    options = ["--presets", "importance", "--budgets", "50%", "--links", "5MB/s"]
    found = said("bench", model, "--base", "4", *TEXT, *options)
    rows = {row["preset"]: row for row in found["rows"] if not row["why"]}
    assert {"full", "uniform-bits", "on-demand", "near", "importance"} == rows.keys()
    for name in ("full", "on-demand", "near"):
        assert (rows[name]["kl"], rows[name]["top1_agreement"]) == (pytest.approx(0, abs=1e-6), 1)
    assert rows["uniform-bits"]["kl"] > 1e-6
    [note] = [note for note in found["notes"] if note.startswith("the base")]
    assert "experts in replicas, " in found["conditions"]
    assert (
        "every expert is a replica of 4 bits" in note
        and "loses of perplexity to the checkpoint itself: " in note
    )
    again = said("bench", model, "--base", "4", *TEXT, *options, "--report", "page.html")
    assert [row["run"] for row in again["rows"]] == [
        row["run"] for row in found["rows"]
    ] and note in again["notes"]
    assert "every expert is a replica of" in Path("page.html").read_text()

    replayed = said(
        "bench",
        model,
        "--base",
        "4",
        "--simulate",
        *TEXT[:6],
        "--budgets",
        "50%",
        "--machine",
        "5gbps",
    )
    full = said("bench", model, "--simulate", *TEXT[:6], "--budgets", "50%", "--machine", "5gbps")
    ours, theirs = ({row["preset"]: row for row in one["rows"]} for one in (replayed, full))
    assert "replicas of 4 bits" in replayed["conditions"] and "replicas" not in full["conditions"]
    assert ours["on-demand"]["misses"] == theirs["on-demand"]["misses"]
    assert ours["on-demand"]["tpot_ms"] < theirs["on-demand"]["tpot_ms"]


def test_tuned_on_a_base(model: str, said: Said) -> None:
    few = [
        "--held-out",
        "text.jsonl",
        "--candidates",
        "3",
        "--budget",
        "50%",
        "--link",
        "5MB/s",
        "--name",
        "packed",
    ]
    found = said("tune", model, "--base", "4", *TEXT, *few)
    assert "every expert is a replica of 4 bits" in found["receipt"]["base"]
    best = found["picks"][0]
    assert best["tried"]["is_lossless"] and best["quality"]["loss"] == pytest.approx(0, abs=1e-6)
    ran = said("run", model, "--base", "4", "--preset", "packed", "--budget", "50%", *PROMPT)
    assert (
        ran["receipt"]["tuned_for"] == f"50% on here, 5MB/s, experts of 4 bits (run {found['run']})"
    )


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["run", "--base", "6", *PROMPT], 2, "--base 6 is none: 16 is the checkpoint as it is"),
        (
            ["run", "--base", "4", "--store", "none.duckdb", *PROMPT],
            5,
            "there are none: run `moectl quantize`",
        ),
        (["run", "--base", "4", "--preset", "moepic", *PROMPT], 2, "leave out --base"),
        (
            ["bench", "--base", "4", "--peers", "all"],
            2,
            "--peers run the checkpoint as it is: leave out --base",
        ),
        (["bench", "--base", "5"], 2, "--base 5 is none"),
        (["simulate", "--base", "1", "--synthetic", "tokens=20"], 2, "--base 1 is none"),
        (["tune", "--base", "0"], 2, "--base 0 is none"),
    ],
)
def test_bad_input(
    options: list[str], code: int, why: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    verb, *rest = options
    capfd.readouterr()
    assert main([verb, *([] if verb == "simulate" else [model]), *rest]) == code
    err = capfd.readouterr().err
    assert why in err and problems(err).count("\n") == 1

"""`--devices` from the command line: a run, a replay of the trace that it recorded, and a bench."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moectl.cli import main
from tests.conftest import Checkpoint

POLICY = ("--budget", "60%", "--devices", "3")

Asked = Callable[..., dict]


@pytest.fixture
def asked(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Asked:
    """`asked(*words)`: the JSON of a command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def ask(*words: str) -> dict:
        capfd.readouterr()
        code = main([*words, "--json"])
        said = capfd.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)

    return ask


def test_a_run_and_its_replay_say_the_same_of_every_device(
    asked: Asked, checkpoint: Checkpoint
) -> None:
    model = str(checkpoint("olmoe"))
    prompt = (
        "run",
        model,
        "--prompt",
        "a dark night",
        "--greedy",
        "--max-new-tokens",
        "12",
        "--threads",
        "1",
    )
    live = asked(*prompt, *POLICY, "--eviction", "lcp", "--trace", "trace.parquet")
    devices = live["receipt"]["devices"]
    assert list(devices) == ["cpu part 0", "cpu part 1", "cpu part 2"]
    assert [one["hops"] for one in devices.values()] == [0, 1, 1]
    assert sum(one["slots"] for one in devices.values()) == live["receipt"]["slots"]
    assert "devices: 3 parts of cpu in the place of GPUs" in live["receipt"]["fallbacks"]
    replayed = asked(
        "simulate", "--trace", "trace.parquet", "--model", model, *POLICY, "--eviction", "lcp"
    )
    assert list(replayed["receipt"]["devices"].values()) == list(devices.values())
    for name in ("requests", "hits", "misses", "demand_bytes"):
        assert (
            replayed["counters"][name]
            == live["counters"][name]
            == sum(one[name] for one in devices.values())
        )
    alone = asked(*prompt, "--budget", "60%")
    assert alone["token_ids"] == live["token_ids"]
    assert (
        alone["receipt"]["devices"] == {} and alone["receipt"]["slots"] == live["receipt"]["slots"]
    )
    bench = (
        "bench",
        model,
        "--simulate",
        "--trace",
        "trace.parquet",
        "--presets",
        "on-demand",
        "--budgets",
        "60%",
    )
    spread = asked(*bench, "--devices", "3")
    one = asked(*bench)
    assert "experts on 3 devices" in spread["conditions"] and "devices" not in one["conditions"]
    plain = {row["policies"]: row for row in replayed["rows"]}["on-demand"]
    first, other = (
        next(row for row in said["rows"] if row["preset"] == "on-demand") for said in (spread, one)
    )
    assert first["misses"] == plain["misses"]
    assert first["run"] != other["run"], "one bench does not take up the other"


def test_a_live_bench_on_parts(asked: Asked, checkpoint: Checkpoint) -> None:
    Path("text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{n} sheep and an old dog"}) for n in range(3))
    )
    text = (
        "--data",
        "text.jsonl",
        "--tokens",
        "12",
        "--length",
        "12",
        "--rounds",
        "1",
        "--threads",
        "1",
    )
    said = asked(
        "bench",
        str(checkpoint("olmoe")),
        *text,
        "--presets",
        "on-demand",
        "--budgets",
        "20%",
        "--devices",
        "3",
    )
    rows = {row["preset"]: row for row in said["rows"]}
    assert "one expert a layer on each of 3 devices is the least" in rows["on-demand"]["why"]
    assert rows["full"]["perplexity_ratio"] == 1 and "experts on 3 devices" in said["conditions"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--devices", "9"), "--devices 9: a layer has 8 experts, so give 1 to 8"),
        (
            ("--devices", "5", "--budget", "9x"),
            "one expert a layer on each of 5 devices is the least",
        ),
    ],
)
def test_what_cannot_be(
    words: tuple[str, ...], problem: str, checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(checkpoint("olmoe")), "--prompt", "a", *words]) == 2
    assert problem in capfd.readouterr().err


def test_tables_name_every_device(
    checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--prompt",
        "a",
        "--greedy",
        "--max-new-tokens",
        "2",
        "--devices",
        "2",
        "--budget",
        "60%",
        "--verbose",
    ]
    assert main(["run", str(checkpoint("olmoe")), *words]) == 0
    said = capfd.readouterr().out
    assert "cpu part 1" in said and "devices.cpu" not in said
    assert (
        main(
            [
                "simulate",
                "--synthetic",
                "tokens=90,requests=2,batch=1",
                "--model",
                "bundled",
                "--devices",
                "2",
            ]
        )
        == 0
    )
    assert "device 1" in capfd.readouterr().out

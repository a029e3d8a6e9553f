"""`moectl inspect prefetch` as a user runs it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.traces.parquet import read_parquet, write_parquet
from moectl.cli import main
from tests import TRACE


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One request of the checked-in trace, in the folder where commands run."""
    monkeypatch.chdir(tmp_path)
    whole = read_parquet(TRACE)
    write_parquet(whole.take(whole.request < 1), "short.parquet")
    return "short.parquet"


def test_every_way_and_every_control(short: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = [
        "inspect",
        "prefetch",
        "--trace",
        short,
        "--num-experts",
        "32",
        "--distance",
        "2",
        "--eviction",
        "lfu",
    ]
    assert main([*options, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    ways = [(row["predictor"], row["layers_ahead"]) for row in said["rows"]]
    names = (
        "next_gate",
        "learned",
        "frequency",
        "affinity",
        "activation",
        "blend",
        "random",
        "popular",
        "oracle",
    )
    assert ways == [(name, distance) for name in names for distance in (1, 2)]
    assert (
        "64 of 256 experts" in said["conditions"]
        and "2 experts prefetched a step" in said["conditions"]
    )
    assert all(
        0 <= row[share] <= 1
        for row in said["rows"]
        for share in ("recall", "precision", "in_time", "late")
    )
    assert len(said["left_out"]) == 1 and "build-maps" in said["left_out"][0]
    assert main(options) == 0
    out = capfd.readouterr().out
    assert "Prefetching" in out and "left out: map" in out


def test_what_the_trace_does_not_tell_is_left_out(
    short: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = replace(read_parquet(short), predicted=None, learned=None)
    write_parquet(bare, "bare.parquet")
    assert (
        main(
            [
                "inspect",
                "prefetch",
                "--trace",
                "bare.parquet",
                "--num-experts",
                "32",
                "--distance",
                "1",
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capfd.readouterr().out)
    by_ids = {"frequency", "affinity", "activation", "random", "popular", "oracle"}
    assert {row["predictor"] for row in said["rows"]} == by_ids
    assert len(said["left_out"]) == 3


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--trace", "nowhere.parquet"], 3, "no trace file nowhere.parquet"),
        (["--trace", "short.parquet", "--num-experts", "8"], 3, "only 8 experts"),
        (
            ["--trace", "short.parquet", "--num-experts", "32", "--eviction", "lruu"],
            2,
            "did you mean lru",
        ),
        (
            ["--trace", "short.parquet", "--num-experts", "32", "--budget", "much"],
            2,
            "budget 'much'",
        ),
        (["--heatmap"], 2, "leave out --heatmap"),
        (["some-model"], 2, "leave some-model out"),
        ([], 2, "there is no store"),
    ],
)
def test_bad_input(
    options: list[str], code: int, says: str, short: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "prefetch", *options]) == code
    said = capfd.readouterr()
    assert said.out == "" and says in said.err and said.err.count("\n") == 1

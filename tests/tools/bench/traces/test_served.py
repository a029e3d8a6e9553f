"""Prefetching and misses on traces of real models: hit rates are the simulator's, and shares add
up."""

import json
from pathlib import Path

import pytest

from artifacts.modelshapes.known import MODELS
from artifacts.traces.parquet import read_parquet, write_parquet
from moectl.bundled import bundled_trace
from moectl.cli import main
from tools.bench.traces.real import TRACES, first_passes
from tools.bench.traces.served import Served

pytestmark = pytest.mark.slow

GPT_OSS = bundled_trace(Path("gpt-oss-20b"))


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(TRACES[0], GPT_OSS, tokens=40, window=1)


def test_hit_rates_are_those_of_the_simulator(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = served.prefetched()
    write_parquet(first_passes(read_parquet(GPT_OSS), 40, apart=False), tmp_path / "cut.parquet")
    one = MODELS["gpt-oss-20b"].shape.expert_nbytes
    rows = {row[0].strip("`"): row for row in table.rows}
    for prefetch in ("none", "frequency"):
        options = [
            "--trace",
            tmp_path / "cut.parquet",
            "--model",
            "gpt-oss-20b",
            "--scope",
            "global",
            "--budget",
            "25%",
        ]
        options += ["--prefetch", prefetch, "--eviction", "lru", "--window", one]
        capfd.readouterr()
        assert main(["simulate", *map(str, options), "--json"]) == 0
        simulated = json.loads(capfd.readouterr().out)["rows"][0]["hit_rate"]
        shown = rows[prefetch][table.columns.index("global 25 %")]
        assert shown.partition(" ")[0] == f"{simulated:.3f}"
    assert rows["none"][-1] == "1.00" and float(rows["frequency"][-1]) > 1
    assert "next_gate" not in rows and "next_gate" in table.note


def test_what_is_neither_loaded_nor_near_is_altered(served: Served) -> None:
    rows = {
        row[0].strip("`"): [float(share) for share in row[1].split(", ")]
        for row in served.missed().rows
    }
    assert rows["fetch"][1:] == [0, 0] and rows["near"][2] == rows["qstar"][2] == 0
    assert rows["drop"][0] < rows["drop:rank=2"][0] < rows["fetch"][0]
    assert rows["drop"][2] > rows["drop:rank=2"][2] > 0

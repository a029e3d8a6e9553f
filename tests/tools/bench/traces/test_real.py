"""The table of real traces: the rates are the simulator's, intervals are of requests, absent files
are skipped."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.traces.parquet import read_parquet, write_parquet
from artifacts.traces.trace import Trace
from moectl.bundled import bundled_trace
from moectl.cli import main
from tests import TRACE
from tools.bench.traces import real as real_traces
from tools.bench.traces.real import (
    TRACES,
    Cell,
    allowed,
    cell_texts,
    first_passes,
    measured,
    units_of,
)

GPT_OSS = TRACES[0]


def test_rates_are_those_of_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    few = ("lru", "lfu", "horizon", "belady")
    monkeypatch.setattr(real_traces, "allowed", lambda trace: (few, ["score"]))
    path = bundled_trace(Path("gpt-oss-20b"))
    table = measured(GPT_OSS, path, 40)
    assert "40 tokens, 1 requests, 24 layers, 4 of 32 experts; intervals by request" in table.note
    assert "layer 6.25 %" not in table.columns and "layer 25 %" in table.columns
    write_parquet(first_passes(read_parquet(path), 40, apart=False), tmp_path / "cut.parquet")
    for scope in ("layer", "global"):
        options = (
            "--trace",
            tmp_path / "cut.parquet",
            "--model",
            "gpt-oss-20b",
            "--scope",
            scope,
            "--budget",
            "25%",
        )
        capfd.readouterr()
        assert main(["simulate", *map(str, options), "--compare", ",".join(few), "--json"]) == 0
        simulated = {
            row["policies"]: row["hit_rate"] for row in json.loads(capfd.readouterr().out)["rows"]
        }
        column = table.columns.index(f"{scope} 25 %")
        shown = {row[0].strip("`"): row[column].strip("*").partition(" ")[0] for row in table.rows}
        assert {name: shown[name] for name in few} == {
            name: f"{simulated[name]:.3f}" for name in few
        }


def test_an_interval_is_of_whole_requests() -> None:
    cell = Cell(hits=np.array([1, 1, 6]), requests=np.array([10, 10, 10]))
    units = np.array([0, 0, 1])
    assert cell.rates(units, np.array([[1, 1], [2, 0], [0, 2]])) == pytest.approx(
        [8 / 30, 2 / 20, 6 / 10]
    )


def test_the_gap_is_measured_from_the_best_that_does_not_know_the_future() -> None:
    found = {
        name: Cell(np.array([hits, hits]), np.array([100, 100]))
        for name, hits in (("lru", 20), ("lfu", 30), ("horizon", 40), ("belady", 50))
    }
    told = cell_texts(found, np.array([0, 1]), np.array([[1, 1], [2, 0]]))
    assert told == {
        "lru": "0.200 ± 0.000",
        "lfu": "**0.300 ± 0.000**",
        "horizon": "0.400 ± 0.000",
        "belady": "0.500 ± 0.000",
        "gap closed": "50% (50% to 50%)",
    }
    found["belady"] = found["horizon"]
    found["lfu"] = found["horizon"]
    assert cell_texts(found, np.array([0, 1]), np.array([[1, 1]]))["gap closed"] == "–"


@pytest.fixture(scope="module")
def toy() -> Trace:
    return read_parquet(TRACE)


def test_requests_together_and_apart(toy: Trace) -> None:
    assert units_of(toy)[1] == "request" and len(np.unique(units_of(toy)[0])) == 6
    decoded = toy.take(np.flatnonzero(toy.token >= 24))
    together = replace(decoded, pass_=decoded.token - 24)
    together = together.take(np.lexsort((together.layer, together.pass_)))
    units, what = units_of(together)
    assert what == "pass" and len(units) == 60
    apart = first_passes(together, 100, apart=True)
    assert units_of(apart)[1] == "request" and (apart.layer == 0).sum() == 100
    assert (np.diff(apart.request) >= 0).all() and len(
        first_passes(together, 100, apart=False)
    ) == 96 * 8


def test_evictions_are_left_out_for_columns_that_a_trace_lacks(toy: Trace) -> None:
    can, cannot = allowed(read_parquet(bundled_trace(Path("gpt-oss-20b"))))
    assert can[-1] == "belady" and {"lru", "least_stale:within=ascending", "horizon"} <= set(can)
    assert set(cannot) == {"score", "map"}
    assert "score" in allowed(toy)[0]


def test_absent_files_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["real_traces", "--traces", str(tmp_path), "--only", "mixtral-8x7b"]
    )
    real_traces.main()
    assert "mixtral-8x7b: skipped, there is no" in capsys.readouterr().out


def test_a_page_is_looked_at_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    monkeypatch.setattr(real_traces, "measured", None)
    monkeypatch.setattr(
        "sys.argv", ["real_traces", "--only", "bundled-model", "--write", str(page)]
    )
    with pytest.raises(BadInput, match="has no place for bundled-model"):
        real_traces.main()

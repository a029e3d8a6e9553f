"""`moectl bench --simulate` as a user runs it: the rows, several links, resumption after Ctrl-C,
recorded traces."""

from pathlib import Path

import pytest

from artifacts.store.store import Store
from moectl.bench import simulated
from moectl.cli import main
from tests.helpers.bench import LIVE, REPLAY, TRACE, Benched, interrupting

pytestmark = pytest.mark.slow


def test_simulated_rows(benched: Benched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = benched(*REPLAY)
    ran = [row["preset"] for row in said["rows"] if not row["why"]]
    assert set(ran) == {"full", "uniform-bits", "on-demand", "near", "specmd", "oracle"}
    assert ran.index("oracle") < ran.index("on-demand") < ran.index("full")
    assert all(
        row[name] is None
        for row in said["rows"]
        for name in ("perplexity_ratio", "kl", "top1_agreement")
    )
    assert any("replicas" in note for note in said["notes"])
    again = benched(*REPLAY)
    assert (
        again["rows"] == said["rows"]
        and "6 settings were replayed by an earlier run" in again["conditions"]
    )
    tight = {row["preset"]: row["why"] for row in benched(*REPLAY, "--budgets", "3x")["rows"]}
    assert "one expert a layer" in tight["on-demand"] and not tight["full"]


def test_a_simulation_over_several_links(
    benched: Benched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--budgets", "25%", "--presets", "near", "--links", "auto,1GB/s+10us")
    rows = benched("--simulate", "--trace", TRACE, *options)["rows"]
    found = {row["link"]: row for row in rows if row["preset"] == "on-demand"}
    assert found["1GB/s+10us"]["tpot_ms"] > 2 * found["auto"]["tpot_ms"]
    assert found["1GB/s+10us"]["misses"] == found["auto"]["misses"]


def test_a_simulation_goes_on_after_an_interruption(
    benched: Benched,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(simulated, "progress_bar", interrupting(3))
        assert main(["bench", *REPLAY]) == 130
    said = benched(*REPLAY)
    assert "3 settings were replayed by an earlier run" in said["conditions"]
    monkeypatch.setenv("MOECTL_STORE", "other.duckdb")
    whole = benched(*REPLAY)
    assert [row | {"run": 0} for row in whole["rows"]] == [row | {"run": 0} for row in said["rows"]]


def test_a_trace_is_recorded_where_there_is_none(model: str, benched: Benched) -> None:
    options = (model, *LIVE, "--simulate", "--budgets", "50%", "--presets", "specmd")
    said = benched(*options)
    assert "run 1 of moe.duckdb: 24 tokens" in said["conditions"]
    assert benched(*options)["conditions"].startswith("run 1 of moe.duckdb")
    with Store.open("moe.duckdb", read_only=True) as store:
        assert store.run(1).info.command == "trace" and store.runs()[-1].run_id == 7

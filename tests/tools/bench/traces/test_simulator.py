"""The benchmark of the simulator runs, and times decisions of a real decode too."""

import pytest

from tools.bench.traces import simulator


def test_a_table_of_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--eviction", "lru", "belady", "--passes", "4", "--rounds", "1", "--live"]
    monkeypatch.setattr("sys.argv", ["bench_simulator", *options])
    simulator.main()
    table = capsys.readouterr().out
    assert "64 steps, 1024 keys" in table and "laid ready" in table and "live" in table
    lru, belady = (
        next(line for line in table.splitlines() if name in line) for name in ("lru  ", "belady  ")
    )
    assert float(lru.split("│")[-2]) > 0 and belady.split("│")[-2].strip() in ("-", "–", "—")


def test_the_policies_that_are_measured_by_default_need_nothing_but_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_simulator", "--passes", "2", "--rounds", "1"])
    simulator.main()
    table = capsys.readouterr().out
    assert {"lru", "horizon", "belady"} <= {*simulator.EVICTIONS} and all(
        name in table for name in simulator.EVICTIONS
    )

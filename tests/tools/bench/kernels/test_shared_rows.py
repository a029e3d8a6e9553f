"""Both ways of threads are measured, on experts that the ways do not share."""

import sys

import pytest

from tools.bench.kernels import shared_rows


@pytest.mark.parametrize("form", ["bfloat16", "GGUF, Q8_0"])
def test_both_ways_are_measured(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_rows, "HIDDEN", 512)
    monkeypatch.setattr(shared_rows, "NEURONS", 1024)
    monkeypatch.setattr(shared_rows, "_HELD", 16 << 20)
    options = ["--format", form, "--experts", "3", "--threads", "1", "2", "--turns", "3"]
    monkeypatch.setattr(sys, "argv", ["shared_rows", *options])
    shared_rows.main()
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{form}, 3 of ")
    assert [row.split()[:2] for row in rows] == [["1", "rows"], ["2", "rows"], ["2", "experts"]]
    assert all(float(row.split()[-1]) > 0 for row in rows)

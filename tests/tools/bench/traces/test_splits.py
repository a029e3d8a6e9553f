"""The benchmark of the solvers runs, on synthetic traces and on a recorded one."""

import pytest

from tests import TRACE
from tools.bench.traces import splits


@pytest.mark.parametrize(
    "source", [["--shape", "3x6x2", "--tokens", "80"], ["--trace", str(TRACE)]]
)
def test_a_table_of_solvers(
    source: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_splits", *source, "--budget", "0.25", "--ratio", "10"])
    splits.main()
    [row] = [line for line in capsys.readouterr().out.splitlines() if "25%" in line]
    even, greedy, dynamic = (float(cell) for cell in row.split("│")[4:7])
    assert 0 <= dynamic <= greedy <= even

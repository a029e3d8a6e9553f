"""The table of decoding speed: every implementation once a round, ratios of the same round."""

from pathlib import Path

import pytest

from tests.conftest import Checkpoint
from tools import bench_decode
from tools.bench_decode import OURS, STOCK, bench, sheet


def test_a_report_has_every_implementation(checkpoint: Checkpoint) -> None:
    report = bench("tiny", checkpoint("olmoe"), rounds=2, tokens=2)
    assert [result.name for result in report.results] == [*STOCK, OURS]
    eager = report.results[0]
    assert (eager.ratio, eager.lower, eager.upper) == (1.0, 1.0, 1.0)
    assert all(result.ms_per_token > 0 and result.lower <= result.ratio <= result.upper for result in report.results)
    assert 0 < report.controller_us < 10_000
    assert len(sheet(report, threads=1, rounds=2, tokens=2).rows) == len(report.results)


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_decode", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        bench_decode.main()
    assert ended.value.code == 2
    assert "holds no config.json" in capsys.readouterr().err

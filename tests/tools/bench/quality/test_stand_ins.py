"""The comparison of stand-ins runs: equal shares, and differences to the buddies."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.conftest import Checkpoint
from tools.bench.quality import stand_ins


def test_a_table_of_stand_ins(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(checkpoint("olmoe"))
    lines = [
        json.dumps({"text": f"{number} sheep and an old dog by the gate"}) for number in range(8)
    ]
    Path("text.jsonl").write_text("\n".join(lines))
    profile = ["--tokens", "120", "--length", "16", "--prefill", "8", "--samples", "20"]
    assert main(["profile", model, "--data", "text.jsonl", *profile]) == 0
    assert main(["build-buddies"]) == 0
    capsys.readouterr()
    options = [
        "--store",
        "moe.duckdb",
        "--model",
        model,
        "--data",
        "text.jsonl",
        "--tokens",
        "64",
        "--length",
        "16",
    ]
    few = ["--budget", "50%", "--quota", "0.05", "--draws", "2"]
    monkeypatch.setattr("sys.argv", ["bench_stand_ins", *options, *few])
    stand_ins.main()
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "5%" in line
    ]
    assert [row[3] for row in rows] == ["buddy", "random_resident", "best_resident", "zero"]
    shares = [float(row[2].rstrip("%")) for row in rows]
    assert len(set(shares)) == 1 and 3 < shares[0] <= 5 and rows[0][6] == "-"
    buddy, *controls = ((float(row[5]), row[6], row[7]) for row in rows)
    for kl, difference, error in controls:
        assert float(difference) == pytest.approx(kl - buddy[0], abs=2e-4) and float(error) >= 0

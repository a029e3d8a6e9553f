"""`moectl pack` writes a checkpoint that the other commands open, and prints what it gains."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.conftest import Checkpoint


def test_a_packed_model_is_run_like_any_other(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("olmoe", "fused")
    out = tmp_path / "packed"
    assert main(["pack", str(folder), str(out)]) == 0
    assert "an expert is one read, 2 reads before" in capsys.readouterr().out
    told = []
    for model in (folder, out):
        run = ["run", str(model), "--prompt", "abc", "--max-new-tokens", "4", "--greedy", "--json"]
        assert main([*run, "--store", str(tmp_path / "none.duckdb")]) == 0
        answer = json.loads(capsys.readouterr().out)
        counts = {
            name: answer["counters"][name]
            for name in ("requests", "hits", "misses", "demand_bytes")
        }
        told.append((answer["token_ids"], counts))
    assert told[0] == told[1]
    assert main(["pack", str(folder), str(out), "--json"]) == 3
    assert "is there already" in capsys.readouterr().err


def test_json_is_one_object(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(checkpoint("olmoe")), str(tmp_path / "packed"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["folder"] == str(tmp_path / "packed") and told["reads_now"] == 1 and told["nbytes"] > 0
    )

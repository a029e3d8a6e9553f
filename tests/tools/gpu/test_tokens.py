"""The rows of tools.gpu.probes.tokens, on a very small model without a GPU."""

import json
import sys
from pathlib import Path

import pytest

from runtime.policies.presets import CANDIDATES
from tools.gpu.probes import tokens

pytestmark = pytest.mark.slow
PEER = {"model_type": "olmoe", "n_cpu_moe": 16, "n_threads": 2}


def test_each_way_has_a_row_beside_llama_cpp_and_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "peer.json"
    prompt = PEER | {"n_prompt": 128, "n_gen": 0, "avg_ts": 256.0}
    decoded = PEER | {"n_prompt": 0, "n_gen": 32, "avg_ts": 50.0}
    file.write_text(json.dumps([prompt, decoded]))
    options = ["--tiny", "--device", "cpu", "--threads", "1", "--sequences", "1", "--peer", file]
    sizes = ["--prompt", "8", "--tokens", "12", "--profile", "full", "--budget", "100"]
    monkeypatch.setattr(sys, "argv", ["tokens", *map(str, options), *sizes])
    tokens.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert lines[0]["ttft_ms"] == 500.0 and lines[1]["tpot_ms"] == 20.0
    rows = [line for line in lines if "hit_rate" in line]
    assert [row["name"] for row in rows] == ["full"] and rows[0]["tpot_ms"] > 0, rows
    (calls,) = (line["rows"] for line in lines if "host" in line)
    assert all(count > 0 and us >= 5 for _, count, us in calls) and calls
    assert "function calls" in lines[-1]["text"]


def test_what_auto_chooses_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = ["--tiny", "--device", "cpu", "--threads", "1", "--sequences", "1"]
    sizes = ["--prompt", "8", "--tokens", "4", "--only", "auto"]
    monkeypatch.setattr(sys, "argv", ["tokens", *options, *sizes])
    tokens.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    (row,) = (line for line in lines if "hit_rate" in line)
    assert row["name"] == "auto" and row["preset"] in CANDIDATES and row["tpot_ms"] > 0, row


def test_names_of_ways_differ_at_each_budget() -> None:
    ways = [(way.name, way.budget) for way in tokens.WAYS]
    assert len(set(ways)) == len(ways)

"""Import of results in the formats of other tools."""

import json
from pathlib import Path

import pytest

from artifacts.errors import BadInput
from artifacts.store.store import Store
from moectl.bench.other_tools import keep, read_results
from moectl.cli import main
from tests.helpers.bench import REPLAY

LLAMA = {
    "build_commit": "8cf427ff",
    "gpu_info": "NVIDIA GeForce RTX 4080",
    "model_type": "qwen2 7B Q4_K - Medium",
    "n_gpu_layers": 10,
    "n_cpu_moe": 0,
    "n_depth": 0,
    "n_prompt": 512,
    "n_gen": 0,
    "avg_ns": 72e6,
    "samples_ns": [74e6, 71e6, 73e6, 72e6, 70e6],
}
ANSWER = {"n_prompt": 0, "n_gen": 128, "samples_ns": [1024e6, 1280e6, 1536e6]}
VLLM = {
    "model_id": "Qwen/Qwen3-30B-A3B",
    "completed": 30,
    "request_rate": "inf",
    "output_throughput": 710.0,
    "median_ttft_ms": 120.0,
    "median_tpot_ms": 20.0,
}


def written(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_llama_bench(tmp_path: Path) -> None:
    tests = [
        LLAMA,
        LLAMA | ANSWER,
        LLAMA | ANSWER | {"n_depth": 64},
        LLAMA | ANSWER | {"n_prompt": 512},
    ]
    found = read_results(written(tmp_path / "llama.json", tests))
    prompt, answer, deep, both = found.rows
    assert (prompt.preset, prompt.ttft_ms, prompt.ttft_quartiles, prompt.tpot_ms) == (
        "llama.cpp pp512",
        72.0,
        (71.0, 73.0),
        None,
    )
    assert (answer.preset, answer.tpot_ms, answer.tokens_per_s, answer.ttft_ms) == (
        "llama.cpp tg128",
        10.0,
        100.0,
        None,
    )
    assert answer.tpot_quartiles == (9.0, 11.0) and answer.link == "-ngl 10, --n-cpu-moe 0"
    assert deep.preset.endswith("@ d64") and "-pg" in both.why and both.tpot_ms is None
    assert (
        found.note.count("8cf427ff") == 1 and "RTX 4080" in found.note and "elsewhere" in found.note
    )


def test_vllm(tmp_path: Path) -> None:
    [row] = read_results(written(tmp_path / "vllm.json", VLLM)).rows
    assert (row.preset, row.ttft_ms, row.tpot_ms, row.tokens_per_s) == (
        "vllm serve",
        120.0,
        20.0,
        710.0,
    )
    assert (row.mode, row.perplexity_ratio, row.tpot_quartiles) == ("imported", None, None)


def test_a_file_is_kept_once(tmp_path: Path) -> None:
    found = read_results(written(tmp_path / "vllm.json", VLLM))
    store = tmp_path / "moe.duckdb"
    assert [keep(found, store=store)[0].run for _ in range(2)] == [1, 1]
    with Store.open(store, read_only=True) as held:
        [row] = held.read("bench", 1).to_pylist()
    assert (row["mode"], row["preset"], row["tpot_ms"], row["misses"]) == (
        "imported",
        "vllm serve",
        20.0,
        None,
    )


@pytest.mark.parametrize("value", ["no json", "[]", "{}", "[3]", {"tokens_per_second": 3}])
def test_what_is_of_neither_tool(value: object, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="llama-bench -o json"):
        read_results(written(tmp_path / "what.json", value))
    with pytest.raises(BadInput, match="llama-bench -o json"):
        read_results(tmp_path / "nowhere.json")


def test_beside_our_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("llama.json", [LLAMA, LLAMA | ANSWER]), ("vllm.json", VLLM)):
        written(tmp_path / name, value)
    assert (
        main(["bench", *REPLAY, "--import", "llama.json", "--import", "vllm.json", "--json"]) == 0
    )
    said = json.loads(capfd.readouterr().out)
    assert [row["preset"] for row in said["rows"][-3:]] == [
        "llama.cpp pp512",
        "llama.cpp tg128",
        "vllm serve",
    ]
    assert not any(row["best"] for row in said["rows"][-3:]) and "vllm.json" in said["notes"][-1]
    assert main(["bench", *REPLAY, "--import", "vllm.json"]) == 0
    assert "vllm serve, imported" in capfd.readouterr().out
    assert main(["bench", *REPLAY, "--import", "moe.duckdb"]) == 3
    assert capfd.readouterr().err.count("\n") == 1

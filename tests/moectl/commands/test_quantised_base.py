"""Commands on a checkpoint that is published in few bits: replicas of it, their price, a tuned
preset."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.helpers import families
from tests.helpers.published import publish
from tests.moectl.conftest import Said

pytestmark = pytest.mark.slow

TEXT = [
    "--data",
    "text.jsonl",
    "--tokens",
    "24",
    "--length",
    "12",
    "--rounds",
    "1",
    "--threads",
    "1",
]
PROMPT = ["--prompt", "a dog", "--max-new-tokens", "6", "--greedy", "--ignore-eos"]
LITTLE = ["--samples", "4", "--length", "12", "--jobs", "1", "--recipe", "plain"]
FORMAT = "mxfp4, 4.41 bits"  # 4.25, and biases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a checkpoint in MXFP4, and a store with its replicas."""
    import torch

    folder = tmp_path_factory.mktemp("base")
    lines = [
        json.dumps({"text": f"{number} sheep and an old dog by the gate"}) for number in range(8)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines))
    fields = {"hidden_size": 64, "intermediate_size": 96}
    plain = families.save("gpt_oss", "hub", folder / "plain", torch.bfloat16, fields=fields)
    publish(plain, folder / "model", "mxfp4")
    where = ["--data", str(folder / "text.jsonl"), "--store", str(folder / "moe.duckdb")]
    assert main(["quantize", str(folder / "model"), *where, *LITTLE]) == 0
    return folder


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    return "model"


def test_widths_that_save_nothing_are_left_out(
    model: str, said: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    again = ["quantize", model, "--data", "text.jsonl", *LITTLE]
    made = said(*again)
    assert (
        made["skipped"] == [4]
        and made["bytes"].keys() == {"1", "2", "3"}
        and made["resumed_experts"] == 8
    )
    assert main(again) == 0
    assert "left out: 4 bits, which are no smaller than the experts" in " ".join(
        capfd.readouterr().out.split()
    )
    assert main(["inspect", "replicas"]) == 0
    assert f"an expert of the checkpoint: 10.1 KiB, {FORMAT}" in " ".join(
        capfd.readouterr().out.split()
    )
    assert main([*again, "--bits", "4"]) == 2
    assert "replicas of 4 bits are no smaller" in capfd.readouterr().err
    assert main(["run", model, "--base", "4", *PROMPT]) == 5
    assert (
        "4 bits are no smaller than the experts of the checkpoint: leave out --base"
        in capfd.readouterr().err
    )


def test_what_few_bits_cost_is_told_of_the_widths_that_there_are(model: str, said: Said) -> None:
    priced = said(
        "inspect", "precision", model, "--data", "text.jsonl", "--tokens", "60", "--draws", "1"
    )
    kinds = [(row["avg_bits"], row["assignment"]) for row in priced["rows"]]
    assert kinds[:5] == [
        (3, "uniform"),
        (2, "uniform"),
        (1, "uniform"),
        (2.5, "mixed"),
        (2.5, "random"),
    ]
    assert (
        "prefix" not in {kind for _, kind in kinds} and f"experts: {FORMAT}" in priced["conditions"]
    )
    assert all(row["share"] < 1 for row in priced["rows"])


def test_a_run_and_its_replay(model: str, said: Said, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.parquet")
    options = ["--preset", "shadow", "--budget", "60%"]
    ran = said("run", model, *options, *PROMPT, "--trace", trace)
    assert ran["receipt"]["expert_format"] == FORMAT
    assert (
        ran["receipt"]["fast_bytes"]
        <= 0.6 * ran["receipt"]["experts"] * ran["receipt"]["expert_bytes"]
    )
    profiled = [
        "--tokens",
        "60",
        "--length",
        "12",
        "--no-similarity",
        "--trace",
        "--data",
        "text.jsonl",
    ]
    said("profile", model, *profiled)
    replayed = said("simulate", "--preset", "shadow", "--budget", "60%")
    assert replayed["receipt"]["expert_bytes"] == ran["receipt"]["expert_bytes"]
    assert replayed["receipt"]["slots"] == ran["receipt"]["slots"]
    assert not any("half as wide" in note for note in replayed["receipt"]["assumed"]), (
        "the config says how wide"
    )


def test_a_tuned_preset(model: str, said: Said) -> None:
    few = [
        "--held-out",
        "text.jsonl",
        "--candidates",
        "2",
        "--budget",
        "60%",
        "--link",
        "5MB/s",
        "--name",
        "packed",
    ]
    found = said("tune", model, *TEXT, *few)
    assert found["receipt"]["base"] == f"the checkpoint, experts in {FORMAT}"
    ran = said("run", model, "--preset", "packed", "--budget", "60%", *PROMPT)
    assert ran["receipt"]["tuned_for"] == f"60% on here, 5MB/s (run {found['run']})"

"""`moectl export`: every module of the written checkpoint equals the stored replica."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from artifacts.quantisation.gptq import Quantized
from artifacts.quantisation.gptq_checkpoint import WIDTHS
from artifacts.quantisation.replica_file import read_replica
from moectl.bundled import demo_model
from moectl.cli import main
from runtime.model.files.source import source_of
from tests.conftest import Checkpoint
from tests.helpers import families
from tests.moectl.commands.test_quantize import said_by
from tools.lab.gptq_reader import GptqCheckpoint

pytestmark = pytest.mark.slow

WIDE = {
    "mixtral": families._family("Mixtral", num_local_experts=4, intermediate_size=64),
    "gpt_oss": families._family("GptOss", num_local_experts=4, head_dim=8, intermediate_size=32),
    "olmoe": families._family("Olmoe", num_experts=4, intermediate_size=32),
}
NAMES = {
    ("mixtral", "hub"): "model.layers.1.block_sparse_moe.experts.2.{w1,w3,w2}",
    ("olmoe", "hub"): "model.layers.1.mlp.experts.2.{gate_proj,up_proj,down_proj}",
    ("olmoe", "fused"): "model.layers.1.mlp.experts.2.{gate_proj,up_proj,down_proj}",
    ("gpt_oss", "fused"): "model.layers.1.mlp.experts.2.{gate_proj,up_proj,down_proj}",
}


@pytest.mark.parametrize(("family", "layout"), NAMES)
def test_every_module_is_its_replica(
    family: str,
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(families.FAMILIES, family, WIDE[family])
    model = families.save(family, layout, Path("model"))
    Path("text.txt").write_text("Twelve sheep and a very old dog.\n" * 30)
    options = ("--bits", "2,3,4,8", "--data", "text.txt", "--length", "32", "--jobs", "1", "--json")
    said = json.loads(said_by(capfd, "quantize", "model", *options))
    for bits in WIDTHS:
        told = json.loads(
            said_by(capfd, "export", "model", "--bits", str(bits), "--out", f"out{bits}", "--json")
        )
        assert (told["bits"], told["run"]) == (bits, 1)
        checkpoint = GptqCheckpoint.open(Path(f"out{bits}"))
        base, _, last = NAMES[family, layout].partition(".{")
        gate, up, down = (f"{base}.{name}" for name in last.rstrip("}").split(","))
        assert {gate, up, down} <= set(checkpoint.modules()) and len(
            checkpoint.modules()
        ) == 2 * 4 * 3
        parts = read_replica(Path(said["folder"]) / "L001-E002.safetensors", bits)
        both = weight(parts["gate_up_proj"])
        rows = (
            (slice(0, None, 2), slice(1, None, 2))
            if family == "gpt_oss"
            else (slice(len(both) // 2), slice(len(both) // 2, None))
        )
        for module, expected in (
            (gate, both[rows[0]]),
            (up, both[rows[1]]),
            (down, weight(parts["down_proj"])),
        ):
            assert torch.equal(weight(checkpoint.read(module)), expected)
        if family == "gpt_oss":
            with safe_open(checkpoint.files[f"{up}.bias"], framework="pt") as file:
                assert torch.equal(file.get_tensor(f"{up}.bias"), parts["gate_up_proj_bias"][1::2])
    config = json.loads(Path("out4/config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    assert config["hidden_size"] == json.loads((model / "config.json").read_text())["hidden_size"]
    with safe_open(model / "model.safetensors", framework="pt") as before:
        others = [name for name in before.keys() if ".experts." not in name]  # noqa: SIM118 - no dictionary
        for name in others:
            with safe_open(checkpoint.files[name], framework="pt") as after:
                assert torch.equal(before.get_tensor(name), after.get_tensor(name))
    assert Path("out4/tokenizer.json").is_file() and others


def weight(packed) -> torch.Tensor:
    return Quantized.from_packed(packed).dequantised()


def test_what_cannot_be_exported_is_said(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(checkpoint("olmoe"))
    Path("text.txt").write_text("Twelve sheep.\n" * 30)
    assert "there is no store" in said_by(capfd, "export", model, "--out", "out", code=3)
    little = ("--data", "text.txt", "--length", "32", "--samples", "2", "--jobs", "1")
    said_by(capfd, "quantize", model, *little, "--bits", "1")
    said = said_by(capfd, "export", model, "--out", "out", code=5)
    assert (
        "in trellis codes, which no reader of GPTQ reads: run moectl quantize --recipe refined"
        in said
    )
    said_by(capfd, "quantize", model, *little, "--recipe", "refined", "--bits", "1,4")
    assert "multiples of 32" in said_by(capfd, "export", model, "--out", "out", code=3)
    assert "has no replicas of 3 bits" in said_by(
        capfd, "export", model, "--out", "out", "--bits", "3", code=3
    )
    assert "2, 3, 4 or 8 bits, not 1" in said_by(
        capfd, "export", model, "--out", "out", "--bits", "1", code=2
    )
    damaged = max(
        Path("moe.duckdb.replicas").rglob("L000-E000.safetensors"),
        key=lambda path: path.stat().st_mtime,
    )
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "damaged or replaced" in said_by(capfd, "export", model, "--out", "out", code=3)
    assert "holds" in said_by(capfd, "export", str(checkpoint("mixtral")), "--out", "out", code=5)
    assert {path.name for path in tmp_path.iterdir()} == {
        "text.txt",
        "moe.duckdb",
        "moe.duckdb.replicas",
    }
    Path("out").mkdir()
    assert main(["export", model, "--out", "out"]) == 3


def test_a_model_as_one_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gguf = ("export", "--what", "gguf", "--type")
    told = json.loads(said_by(capfd, *gguf, "q8_0", "--out", "demo.gguf", "--json"))
    assert told == {"file": "demo.gguf", "type": "q8_0", "nbytes": Path("demo.gguf").stat().st_size}
    theirs = source_of(Path("demo.gguf")).tokenizer()
    ours = AutoTokenizer.from_pretrained(demo_model())
    assert theirs.encode("Two sheep, 12 dogs.") == ours.encode("Two sheep, 12 dogs.")
    for options, code, line in (
        (("q8_0", "--out", "demo.gguf"), 3, "demo.gguf is there already"),
        (("q8_0",), 2, "give --out FILE"),
        (("q3_0", "--out", "new.gguf"), 2, "did you mean q8_0?"),
    ):
        assert main([*gguf, *options]) == code and line in capfd.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["demo.gguf"]

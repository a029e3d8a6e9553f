"""Every checkpoint that cannot be used is refused with one line that names what is wrong; nothing is guessed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from artifacts.errors import BadInput
from runtime.model import open_model
from runtime.weights import aligned
from tests.conftest import Checkpoint
from tests.families import save

GATE = "model.layers.1.mlp.gate.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A private copy of a checkpoint, to be damaged."""
    return lambda *which: shutil.copytree(checkpoint(*which), tmp_path / "model")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing", "some-org/some-model", "not a valid/id/at all"])
def test_unknown_path(name: str) -> None:
    assert "is neither a folder here nor reachable as a hub id" in _refusal(name)


def test_file_instead_of_folder(copy: Callable[..., Path]) -> None:
    assert "is a file: give the folder" in _refusal(copy("olmoe") / "config.json")


def test_folder_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in _refusal(tmp_path)


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[]", "a list instead"), ("{}", "cannot use")])
def test_config_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert said in _refusal(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    config = {
        "model_type": "unheard-of",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "cannot use the config.json" in _refusal(tmp_path)


def test_dense_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "llama is not a Mixture-of-Experts model" in _refusal(tmp_path)


def test_quantised_checkpoint(copy: Callable[..., Path]) -> None:
    folder = _with_config(copy("gpt_oss"), quantization_config={"quant_method": "mxfp4"})
    assert "is quantised (mxfp4)" in _refusal(folder)


def test_pickled_weights(copy: Callable[..., Path]) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights" in _refusal(folder)


def test_no_weights(copy: Callable[..., Path]) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    assert "the weights are missing" in _refusal(folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = save("olmoe", "hub", tmp_path, shard_size="40KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"{lost} is missing" in _refusal(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_broken_index(copy: Callable[..., Path], index: str) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert "is not an index of safetensors shards" in _refusal(folder)


def test_index_that_leaves_its_folder(copy: Callable[..., Path]) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    assert "outside its own folder" in _refusal(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: (2**40).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"\xff" + data[9:],
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b'"F32"', b'"F64"', 1),
    ],
)
def test_damaged_shard(copy: Callable[..., Path], damage: Callable[[bytes], bytes]) -> None:
    path = copy("olmoe") / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path} is truncated or no safetensors file" in _refusal(path.parent)


def test_missing_router(copy: Callable[..., Path]) -> None:
    folder = _with_tensors(copy("olmoe"), lambda tensors: tensors.pop(GATE))
    assert f"{GATE} is missing from the checkpoint" in _refusal(folder)


def test_missing_router_of_a_renaming_family(copy: Callable[..., Path]) -> None:
    name = "model.layers.0.block_sparse_moe.gate.weight"
    folder = _with_tensors(copy("phimoe"), lambda tensors: tensors.pop(name))
    assert "model.layers.0.mlp.router.weight is missing" in _refusal(folder)


def test_missing_tied_embedding(copy: Callable[..., Path]) -> None:
    folder = _with_tensors(copy("qwen2_moe"), lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "is missing from the checkpoint" in _refusal(folder)


def test_missing_expert_tensor(copy: Callable[..., Path]) -> None:
    folder = _with_tensors(copy("olmoe"), lambda tensors: tensors.pop(UP))
    assert "layer 1, expert 3: up_proj.weight is missing" in _refusal(folder)


def test_missing_experts_of_a_layer(copy: Callable[..., Path]) -> None:
    folder = _with_tensors(
        copy("deepseek_v2", "fused"), lambda tensors: tensors.pop("model.layers.2.mlp.experts.down_proj")
    )
    assert "layer 1, expert 0: down_proj is missing" in _refusal(folder)


def test_surplus_expert(copy: Callable[..., Path]) -> None:
    surplus = UP.replace(".3.", ".8.")
    folder = _with_tensors(copy("olmoe"), lambda tensors: tensors.update({surplus: tensors[UP].clone()}))
    assert f"{surplus} in the checkpoint is one expert too many: by its config a layer has 8" in _refusal(folder)


@pytest.mark.parametrize("name", [GATE, UP])
def test_wrong_shape(copy: Callable[..., Path], name: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    rows = {GATE: 8, UP: 24}[name]
    folder = _with_tensors(copy("olmoe"), cut)
    assert f"{name} has shape [{rows - 1}, 32] where the config asks for [{rows}, 32]" in _refusal(folder)


def test_wrong_shape_of_fused_experts(copy: Callable[..., Path]) -> None:
    folder = _with_config(copy("olmoe", "fused"), num_experts=9)
    assert "has shape [8, 32, 24] where the config asks for [9, 32, 24]" in _refusal(folder)


def test_top_k_above_the_number_of_experts(copy: Callable[..., Path]) -> None:
    assert "selects 9 experts per token but has only 8" in _refusal(_with_config(copy("olmoe"), num_experts_per_tok=9))


def test_generation_config_that_cannot_be_used(copy: Callable[..., Path]) -> None:
    folder = copy("olmoe")
    (folder / "generation_config.json").write_text("{")
    assert f"cannot use {folder / 'generation_config.json'}" in _refusal(folder)


def test_tokenizer_that_cannot_be_loaded(copy: Callable[..., Path]) -> None:
    folder = copy("olmoe")
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer in" in _refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_expert_that_is_not_finite(copy: Callable[..., Path], value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][5, 7] = value

    store = open_model(str(_with_tensors(copy("olmoe"), spoil))).store
    buffer = aligned(store.layout.nbytes)
    store.read(1, 2, buffer)
    for _ in range(2):  # refused again when asked again
        with pytest.raises(BadInput, match="layer 1, expert 3: gate_up_proj holds NaN or infinity"):
            store.read(1, 3, buffer)


def _refusal(folder: Path | str) -> str:
    """The one line that opening `folder` is refused with."""
    with pytest.raises(BadInput) as caught:
        open_model(str(folder))
    line = str(caught.value)
    assert line.count("\n") == 0, line
    assert len(line) < 400, line
    return line


def _with_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return folder

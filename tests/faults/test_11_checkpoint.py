"""A checkpoint that lacks a router or an expert, has one of another shape or with NaN in it, or
another model's config.

As a user meets it: tests/moectl/commands/test_bad_input.py. Nothing is guessed or filled with
random numbers.
"""

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artifacts.errors import BadInput
from runtime.model.layout import aligned
from runtime.model.open import open_model
from tests.faults.models import GATE, UP, Copy, refusal, with_config, with_tensors


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./missing", "some-org/some-model", "not a valid/id/at all"]
)
def test_unknown_path(name: str) -> None:
    assert "is neither a folder here nor reachable as a hub id" in refusal(name)


def test_file_instead_of_folder(copy: Copy) -> None:
    assert "is a file: give the folder" in refusal(copy("olmoe") / "config.json")


def test_folder_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[]", "a list instead"), ("{}", "cannot use")]
)
def test_config_that_is_none(copy: Copy, text: str, said: str) -> None:
    path = copy("olmoe") / "config.json"
    path.write_text(text)
    assert said in refusal(path.parent)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_files_in_another_encoding(copy: Copy, name: str, encoding: str) -> None:
    path = copy("olmoe") / name
    path.write_text('{"a": 1}', encoding=encoding)
    assert f"{path} is in another encoding than UTF-8" in refusal(path.parent)


def test_dense_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "llama is not a Mixture-of-Experts model" in refusal(tmp_path)


def test_quantised_checkpoint(copy: Copy) -> None:
    folder = with_config(copy("gpt_oss"), quantization_config={"quant_method": "hqq"})
    assert "quantised by 'hqq': moectl reads fp8" in refusal(folder)


def test_no_weights(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    assert "the weights are missing" in refusal(folder)


def test_missing_router(copy: Copy) -> None:
    folder = with_tensors(copy("olmoe"), lambda tensors: tensors.pop(GATE))
    assert f"{GATE} is missing from the checkpoint" in refusal(folder)


def test_missing_router_of_a_renaming_family(copy: Copy) -> None:
    name = "model.layers.0.block_sparse_moe.gate.weight"
    folder = with_tensors(copy("phimoe"), lambda tensors: tensors.pop(name))
    assert "model.layers.0.mlp.router.weight is missing" in refusal(folder)


def test_missing_tied_embedding(copy: Copy) -> None:
    folder = with_tensors(
        copy("qwen2_moe"), lambda tensors: tensors.pop("model.embed_tokens.weight")
    )
    assert "is missing from the checkpoint" in refusal(folder)


def test_missing_expert_tensor(copy: Copy) -> None:
    folder = with_tensors(copy("olmoe"), lambda tensors: tensors.pop(UP))
    assert "layer 1, expert 3: up_proj.weight is missing" in refusal(folder)


def test_missing_experts_of_a_layer(copy: Copy) -> None:
    folder = with_tensors(
        copy("deepseek_v2", "fused"),
        lambda tensors: tensors.pop("model.layers.2.mlp.experts.down_proj"),
    )
    assert "layer 1, expert 0: down_proj is missing" in refusal(folder)


def test_surplus_expert(copy: Copy) -> None:
    surplus = UP.replace(".3.", ".8.")
    folder = with_tensors(
        copy("olmoe"), lambda tensors: tensors.update({surplus: tensors[UP].clone()})
    )
    assert (
        f"{surplus} in the checkpoint is one expert too many: by its config a layer has 8"
        in refusal(folder)
    )


@pytest.mark.parametrize("name", [GATE, UP])
def test_wrong_shape(copy: Copy, name: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    rows = {GATE: 8, UP: 24}[name]
    folder = with_tensors(copy("olmoe"), cut)
    assert f"{name} has shape [{rows - 1}, 32] where the config asks for [{rows}, 32]" in refusal(
        folder
    )


def test_wrong_shape_of_fused_experts(copy: Copy) -> None:
    folder = with_config(copy("olmoe", "fused"), num_experts=9)
    assert "has shape [8, 32, 24] where the config asks for [9, 32, 24]" in refusal(folder)


def test_top_k_above_the_number_of_experts(copy: Copy) -> None:
    assert "selects 9 experts per token but has only 8" in refusal(
        with_config(copy("olmoe"), num_experts_per_tok=9)
    )


def test_no_top_k(copy: Copy) -> None:
    assert "takes None experts per token" in refusal(
        with_config(copy("deepseek_v2"), num_experts_per_tok=None)
    )


def test_generation_config_that_cannot_be_used(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "generation_config.json").write_text("{")
    assert f"cannot use {folder / 'generation_config.json'}" in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_expert_that_is_not_finite(copy: Copy, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][5, 7] = value

    store = open_model(str(with_tensors(copy("olmoe"), spoil))).store
    buffer = aligned(store.layout.nbytes)
    store.read(1, 2, buffer)
    for _ in range(2):  # refused at the second attempt as well
        with pytest.raises(BadInput, match="layer 1, expert 3: gate_up_proj holds NaN or infinity"):
            store.read(1, 3, buffer)


@pytest.mark.parametrize(
    ("name", "number"),
    [("intermediate_size", 0), ("sliding_window", 10**30), ("x", -(2**63)), ("swiglu_limit", 1e39)],
)
def test_numbers_that_nothing_has_so_many_of(copy: Copy, name: str, number: float) -> None:
    assert "config.json" in refusal(with_config(copy("olmoe"), **{name: number}))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts"])
def test_a_model_of_more_parts_than_its_checkpoint_is_not_built(copy: Copy, name: str) -> None:
    folder = with_config(copy("olmoe"), **{name: 2**31})
    began = time.process_time()
    assert str(2**31) in refusal(folder).replace(",", "")
    assert time.process_time() - began < 5

"""A model that is written as GGUF is the same in llama.cpp and in moectl."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from profilers.compare.llama_cpp import LlamaCpp
from profilers.compare.quality import TextReading, compare, read
from profilers.export.gguf import WRITTEN, export_gguf
from runtime.model.gguf.file import open_gguf
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.helpers import families
from tools.make.checkpoint import byte_tokenizer

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260}
OWN = {
    "olmoe": {"intermediate_size": 32, "num_key_value_heads": 4},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "head_dim": 32,
        "norm_topk_prob": True,
    },
}
TEXT = [np.random.default_rng(seed).integers(3, SIZES["vocab_size"], 14) for seed in range(2)]
PREFILL = 6


def opened(family: str, folder: Path, **changes: object) -> MoeModel:
    families.save(family, "hub", folder, fields=SIZES | OWN[family] | changes)
    byte_tokenizer().save_pretrained(folder)
    return open_model(str(folder))


def reading(model: MoeModel) -> TextReading:
    with Session(model, Settings("full")) as session:
        return read(session, TEXT, prefill=PREFILL)


@pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="llama.cpp is not installed (extra: peers)"
)
@pytest.mark.parametrize("family", WRITTEN)
def test_llama_cpp_and_moectl_read_what_is_written(family: str, tmp_path: Path) -> None:
    model = opened(family, tmp_path / "model")
    full = reading(model)
    for type_, most in (("f32", 1e-5), ("bf16", 1e-3), ("q8_0", 1e-2)):
        path = tmp_path / f"{type_}.gguf"
        export_gguf(model, tmp_path / "model", path, type_)
        llama = LlamaCpp(path, threads=1, num_tokens=len(TEXT[0]), vocab_size=SIZES["vocab_size"])
        assert compare(llama.read(TEXT, prefill=PREFILL), full).kl < most
    assert torch.equal(reading(open_model(str(tmp_path / "f32.gguf"))).logits, full.logits)


def test_each_expert_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("olmoe", tmp_path / "model")
    keys = []
    read_one = model.store.read
    done = []
    monkeypatch.setattr(
        model.store,
        "read",
        lambda *key_and_buffer: (keys.append(key_and_buffer[:2]), read_one(*key_and_buffer)),
    )
    export_gguf(
        model,
        tmp_path / "model",
        tmp_path / "a.gguf",
        "q8_0",
        progress=lambda *each: done.append(each),
    )
    assert sorted(keys) == [
        divmod(key, model.shape.num_experts) for key in range(model.shape.num_keys)
    ]
    assert done[-1][0] == done[-1][1] == len(done)


def test_rows_that_are_no_whole_blocks_are_in_16_bits(tmp_path: Path) -> None:
    model = opened("olmoe", tmp_path / "model", intermediate_size=24)
    export_gguf(model, tmp_path / "model", tmp_path / "a.gguf", "mxfp4")
    tensors = open_gguf(tmp_path / "a.gguf").tensors
    types = {
        name: tensor.shard.types.get(name, str(tensor.dtype)) for name, tensor in tensors.items()
    }
    of_experts = [types[f"blk.0.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")]
    assert of_experts == ["MXFP4", "MXFP4", "torch.float16"]
    assert (
        types["blk.0.attn_q.weight"] == "Q8_0"
        and types["blk.0.ffn_gate_inp.weight"] == "torch.float32"
    )


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("olmoe", {"clip_qkv": 0.6}, "clip_qkv"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers without experts"),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "linear",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    family: str, changes: dict, told: str, tmp_path: Path
) -> None:
    model = opened(family, tmp_path / "model", **changes)
    with pytest.raises(BadInput, match=told):
        export_gguf(model, tmp_path / "model", tmp_path / "a.gguf", "bf16")
    assert not (tmp_path / "a.gguf").exists()

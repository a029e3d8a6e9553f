"""Bytes that are told from a config alone, against the tensors of checkpoints in the published
layouts."""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from artifacts.modelshapes.known import model_shape
from artifacts.modelshapes.memory import backbone_memory, backbone_of
from tests.helpers import families
from tests.helpers.published import CONFIGS, MAKERS, Maker, awq, fp8, gptq, packed, publish

HIDDEN = {"hidden_size": 256}
ATTENTION = {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
SIZES = {
    "deepseek_v2": HIDDEN | ATTENTION | {"intermediate_size": 512, "moe_intermediate_size": 256},
    "gpt_oss": HIDDEN | {"intermediate_size": 256, "head_dim": 128},
    "mixtral": HIDDEN | {"intermediate_size": 256},
    "qwen2_moe": HIDDEN | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "qwen3_moe": HIDDEN | {"intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 128},
}


def compressed(**weights: object) -> Mapping:
    return {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"type": "int", **weights}, "targets": ["Linear"]}
        },
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.[kv]_proj"],
    }


# By name: the family, the quantisation, what makes a matrix, and which modules are left alone.
CASES: dict[str, tuple[str, Mapping, Maker, str]] = {
    "fp8 blocks": (
        "deepseek_v2",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        partial(fp8, block=128),
        "",
    ),
    "fp8 rows, some layers": (
        "qwen3_moe",
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
            "exclude_modules": ["*layers.0.self*"],
        },
        partial(fp8, block=0),
        r"layers\.0\.self_attn",
    ),
    "mxfp4": ("gpt_oss", CONFIGS["mxfp4"], MAKERS["mxfp4"], "self_attn"),
    "int4 by 32": ("qwen3_moe", compressed(num_bits=4, group_size=32), packed, r"[kv]_proj"),
    "int4 by 128, zeros": (
        "deepseek_v2",
        compressed(num_bits=4, group_size=128, symmetric=False),
        partial(packed, group=128, has_zeros=True),
        r"\.[kv]_proj",
    ),
    "int8 by 128": (
        "qwen2_moe",
        compressed(num_bits=8, group_size=128),
        partial(packed, bits=8, group=128),
        r"[kv]_proj",
    ),
    "gptq": (
        "qwen2_moe",
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*self_attn": {}}},
        partial(gptq, group=128),
        "self_attn",
    ),
    "awq": (
        "mixtral",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "modules_to_not_convert": ["self_attn"],
        },
        partial(awq, group=64),
        "self_attn",
    ),
    "nvfp4": ("qwen3_moe", CONFIGS["nvfp4"], MAKERS["nvfp4"], ""),
}
BESIDE = (
    r"embed|lm_head|norm|mlp\.gate\.|block_sparse_moe\.gate|router|shared_expert_gate|bias|sinks"
)


@pytest.fixture(params=CASES)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A plain checkpoint and the published one, whose quantisation is nested in a config with
    several parts."""
    family, config, make, left = CASES[request.param]
    plain = families.save(family, "hub", tmp_path / "plain", torch.bfloat16, fields=SIZES[family])

    def choose(name: str, tensor: torch.Tensor) -> Maker | None:
        is_left = tensor.dim() < 2 or re.search(BESIDE, name) or left and re.search(left, name)
        return None if is_left else make

    out = publish(plain, tmp_path / "published", "", config=config, choose=choose)
    path = out / "config.json"
    path.write_text(
        json.dumps({"model_type": "wrapper", "text_config": json.loads(path.read_text())})
    )
    return plain, out


def nbytes(folder: Path, *, of_experts: bool) -> int:
    tensors = load_file(folder / "model.safetensors")
    return sum(
        tensor.nbytes for name, tensor in tensors.items() if (".experts." in name) == of_experts
    )


def test_bytes_are_those_of_the_tensors(published: tuple[Path, Path]) -> None:
    plain, out = published
    model = model_shape(str(out))
    memory = backbone_memory(model, backbone_of(str(out)))
    assert model.shape.nbytes == pytest.approx(nbytes(out, of_experts=True), rel=0.02)
    assert memory.stored_nbytes == pytest.approx(nbytes(out, of_experts=False), rel=0.02)
    assert memory.weights_nbytes == pytest.approx(nbytes(plain, of_experts=False), rel=0.02)

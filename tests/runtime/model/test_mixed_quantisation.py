"""Checkpoints whose modules differ in format or width, and those whose quantisation is said beside
the config."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.formats.stated import MODELOPT_FILE
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.helpers import families
from tests.helpers.published import CONFIGS, MAKERS, Maker, fp8, gptq, packed, publish

IDS = torch.arange(3, 20)[None]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}


def group(kind: str, target: str, **weights: object) -> Mapping:
    return {
        "format": kind,
        "targets": [target],
        "weights": {"num_bits": 4, "group_size": 32, **weights},
    }


def mixed(*groups: Mapping) -> Mapping:
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": named,
    }


INT4 = group("pack-quantized", "re:.*experts.*")


def _in_four_dimensions(
    rows: int, columns: int, generator: torch.Generator
) -> Mapping[str, torch.Tensor]:
    """Scales as modelopt shapes those of blocks."""
    tensors = fp8(rows, columns, generator)
    return tensors | {"scale": tensors["scale"][:, None, :, None]}


def _in_any_order(
    make: Maker, rows: int, columns: int, generator: torch.Generator
) -> Mapping[str, torch.Tensor]:
    """Groups in the order of activations."""
    index = (torch.arange(columns) // 32)[torch.randperm(columns, generator=generator)]
    return make(rows, columns, generator) | {"g_idx": index.int()}


CASES: dict[
    str, tuple[Mapping, Maker, Maker]
] = {  # what makes experts, and the other modules that are quantised
    "attention in FP8": (
        mixed(group("float-quantized", "re:.*self_attn.*", num_bits=8, strategy="channel"), INT4),
        packed,
        partial(fp8, block=0),
    ),
    "attention in 8 bits": (
        mixed(INT4, group("pack-quantized", "Linear", num_bits=8, group_size=16)),
        packed,
        partial(packed, bits=8, group=16),
    ),
    "experts in NVFP4, attention in MXFP4": (
        mixed(
            group("mxfp4-pack-quantized", "Linear"), group("nvfp4-pack-quantized", "re:.*experts.*")
        ),
        MAKERS["nvfp4"],
        MAKERS["mxfp4"],
    ),
    "GPTQ of two widths": (
        {
            **CONFIGS["gptq"],
            "dynamic": {"+:.*self_attn": {"bits": 8, "group_size": 16}, "-:.*q_proj": {}},
        },
        gptq,
        partial(gptq, bits=8, group=16),
    ),
    "GPTQ in the order of activations": (
        {**CONFIGS["gptq"], "desc_act": True},
        partial(_in_any_order, gptq),
        partial(_in_any_order, gptq),
    ),
    "integers of 8 bits in the order of activations": (
        mixed(group("pack-quantized", "Linear", num_bits=8, actorder="group")),
        partial(_in_any_order, partial(packed, bits=8)),
        partial(_in_any_order, partial(packed, bits=8)),
    ),
    "modelopt's layers": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.*.self_attn.o_proj": {"quant_algo": "FP8"},
                "model.layers.*.mlp.experts*": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        MAKERS["nvfp4"],
        partial(fp8, block=0),
    ),
    "modelopt's FP8 in blocks, attention in FP8 by matrix": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.*.self_attn.o_proj": {"quant_algo": "FP8"},
                "model.layers.*.mlp.experts*": {"quant_algo": "FP8_PB_WO", "group_size": 16},
            },
        },
        _in_four_dimensions,
        partial(fp8, block=0),
    ),
}


def check_equal(plain: Path, published: Path) -> None:
    """The published checkpoint gives the logits of the plain one, and its experts stay packed."""
    reference = AutoModelForCausalLM.from_pretrained(plain, experts_implementation="eager").eval()
    opened = open_model(str(published))
    assert not opened.store.layout.is_plain
    with Session(opened, Settings(preset="on-demand", budget="30%")), torch.inference_mode():
        assert torch.equal(opened.model(IDS).logits, reference(IDS).logits)
    opened.store.close()


@pytest.mark.parametrize("name", CASES)
def test_each_module_has_its_own_format(tmp_path: Path, name: str) -> None:
    config, of_experts, of_others = CASES[name]
    plain = families.save("qwen3_moe", "hub", tmp_path / "plain", torch.bfloat16, fields=SIZES)

    def choose(tensor_name: str, tensor: torch.Tensor) -> Maker | None:
        if ".experts." in tensor_name:
            return of_experts
        return of_others if "self_attn.o_proj" in tensor_name else None

    check_equal(plain, publish(plain, tmp_path / "published", "", config=config, choose=choose))


@pytest.mark.parametrize("method", ["nvfp4", "fp8"])
def test_modelopt_says_it_beside_the_config(tmp_path: Path, method: str) -> None:
    plain = families.save("qwen3_moe", "hub", tmp_path / "plain", torch.bfloat16, fields=SIZES)
    said = {
        "quant_algo": method.upper(),
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": "FP8",
    }
    make = MAKERS["nvfp4"] if method == "nvfp4" else partial(fp8, block=0)
    config = {"quant_method": "modelopt", **said}
    published = publish(
        plain,
        tmp_path / "published",
        "",
        config=config,
        choose=lambda name, _: make if ".experts." in name else None,
    )
    path = published / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    (published / MODELOPT_FILE).write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": said})
    )
    check_equal(plain, published)

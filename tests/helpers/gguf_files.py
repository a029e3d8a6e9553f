"""Small random GGUF files of every architecture that is read, written by the package `gguf` as
llama.cpp's convert_hf_to_gguf.py lays them out."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from zlib import crc32

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.gguf.gguf_header import TYPES
from runtime.model.skeleton import auto_class
from tests.helpers.gguf_arrays import stored, stored_arrays, tiled
from tests.helpers.gguf_entries import TOKENS, describe_model
from tools.make.families import tiny

SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "mlp_only_layers": [],
    "num_experts": 6,
    "head_dim": 64,
}
_LINEAR_HEADS = ("linear_key_head_dim", "linear_value_head_dim")
_HEADS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LIMITED = "group_limited_greedy"
_GROUPED = {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_LATENT = {"kv_lora_rank": 64, "num_key_value_heads": 4} | dict.fromkeys(_HEADS, 32)
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} | dict.fromkeys(
    _LINEAR_HEADS, 32
)
_SCALED = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.5,
}
OWN = {
    "deepseek_v2": {
        **_GROUPED,
        **_LATENT,
        "norm_topk_prob": False,
        "q_lora_rank": 64,
        "topk_method": _LIMITED,
    },
    "deepseek_v3": {**_GROUPED, **_LATENT, "q_lora_rank": 64},
    "granitemoe": {"intermediate_size": 256, "num_local_experts": 6, **_SCALED},
    "granitemoeshared": {
        "intermediate_size": 256,
        "num_local_experts": 6,
        "shared_intermediate_size": 512,
        **_SCALED,
    },
    "hunyuan_v1_moe": {"intermediate_size": 256, "moe_topk": 2},
    "lfm2_moe": {
        "intermediate_size": 512,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "qwen3_5_moe_text": {**_LINEAR, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_vl_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 256, "tie_word_embeddings": True},
    "mixtral": {"intermediate_size": 256, "num_local_experts": 6, "sliding_window": None},
    "olmoe": {"intermediate_size": 256, "num_key_value_heads": 4},
    "dots1": {**_GROUPED, "num_key_value_heads": 4, "sliding_window": None},
    "glm4_moe": {**_GROUPED, "use_qk_norm": True},
    "minimax_m2": {"intermediate_size": 256, "num_local_experts": 6},
    "ernie4_5_moe": {"moe_num_experts": 6, "intermediate_size": 512},
    "gpt_oss": {"intermediate_size": 128, "num_local_experts": 6},
}
ARCHITECTURES = {
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_vl_moe": gguf.MODEL_ARCH.QWEN3VLMOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
_IN_FLOAT32 = r"ffn_gate_inp|(ssm_conv1d|shortconv\.conv)\.|\.bias"  # by names in the file
_UNQUANTISED = r"(gate|router|wg|conv1d|conv\.conv)\.weight|_bias|\.visual\."  # by the model's
_PLAIN = {"F32": np.float32, "F16": np.float16}
# ggml's numbers of types that the package does not know yet
_NEWER = {"Q1_0": 41, "Q2_0": 42}
_ENCODED = ("Q8_0", "Q4_0", "MXFP4", "BF16")  # by the package; blocks of other types are random
SCALES = {
    "Q6_K": 208,
    "Q3_K": 108,
    "Q2_K": 80,
    "TQ1_0": 52,
    "TQ2_0": 64,
    "IQ1_M": 48,
}
"""Places of a block's scale, a half, where not at its beginning; IQ1_M has it in four parts from
there on."""
# of a block's codes, where they have minima, which Q4_1 and Q5_1 add
_MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q4_1": -7.5, "Q5_1": -15.5}
_LARGEST = {
    "Q2_K": 4e-3,
    "Q3_K": 2e-3,
    "IQ4_NL": 2e-3,
    "IQ4_XS": 6e-5,
    "Q4_1": 4e-3,
    "Q5_0": 2e-3,
    "Q5_1": 2e-3,
    "TQ1_0": 4e-2,
    "TQ2_0": 4e-2,
    "Q1_0": 4e-2,
    "Q2_0": 2e-2,
    "IQ1_S": 3e-3,
    "IQ1_M": 3e-3,
    "IQ3_XXS": 1e-4,
    "IQ3_S": 1e-4,
}  # scales, where not 3e-4

Types = Callable[[str], str]
"""The type of a tensor by its name in the file."""


def made(family: str) -> PreTrainedModel:
    """The model whose numbers, as far as a type can hold them, are in the files of `write`."""
    model = tiny(family, SIZES | OWN[family])
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer += torch.linspace(-0.2, 0.2, buffer.numel())
    return model


def write(
    family: str,
    path: Path,
    types: Types,
    *,
    parts: int = 1,
    change: Callable[[dict[str, np.ndarray]], None] = lambda arrays: None,
    describe: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a model to `path`, or to files `-0000n-of-0000m.gguf` beside it; returns the path of
    the first.

    `change` may alter the arrays by their names, `describe` adds entries. Norms and routers are of
    float32, as llama.cpp writes them.
    """
    model = made(family)
    writer = gguf.GGUFWriter(
        path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]], split_max_tensors=_each(model, parts)
    )
    describe_model(writer, model)
    describe(writer)
    arrays = stored_arrays(model, ARCHITECTURES[family])
    change(arrays)
    for name, array in arrays.items():
        type_ = "F32" if array.ndim == 1 or re.search(_IN_FLOAT32, name) else types(name)
        type_ = _fit(type_, array)
        data = _encoded(name, array, type_)
        writer.add_tensor(name, data, raw_dtype=None if type_ in _PLAIN else _number(type_))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def reference(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers' own loader of GGUF files dequantises it, in the sizes that it does
    not read."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.moe_intermediate_size = config.shared_expert_intermediate_size = SIZES[
        "moe_intermediate_size"
    ]
    loading = {
        "gguf_file": path.name,
        "config": config,
        "dtype": dtype,
        "experts_implementation": "eager",
    }
    return AutoModelForCausalLM.from_pretrained(path.parent, **loading).eval()


def _fit(type_: str, array: np.ndarray) -> str:
    """The type of an array whose rows may be too short for this one: as llama.cpp, or similar."""
    return "Q8_0" if array.shape[-1] % TYPES[type_].num_weights else type_


def _each(model: PreTrainedModel, parts: int) -> int:
    """The number of tensors in a part."""
    return (
        0 if parts == 1 else -(-(len(model.state_dict()) + model.config.num_hidden_layers) // parts)
    )


def unpack(types: Types, arrays: dict[str, np.ndarray]) -> None:
    """Replace the arrays of `write` by the numbers that are in a file of these types, by moectl's
    formulas."""
    for name, array in arrays.items():
        if array.ndim > 1 and not re.search(_IN_FLOAT32, name):
            form = GGML[_fit(types(name), array)]
            data = torch.from_numpy(_encoded(name, array, form.name))
            rows = form.dequantise({"blocks": data.reshape(-1, data.shape[-1])})
            arrays[name] = rows.numpy().reshape(array.shape)


def dequantised(family: str, folder: Path, types: Types, dtype: torch.dtype) -> PreTrainedModel:
    """The model of the numbers that are in a file of `write`, as transformers opens it from
    safetensors."""
    model = made(family).requires_grad_(False)
    for name, parameter in model.named_parameters():
        type_ = types(name)
        if name.endswith("A_log"):
            parameter.copy_(parameter.exp().log())
        elif (
            family == "qwen3_5_moe_text"
            and name.endswith("norm.weight")
            and "linear_attn" not in name
        ):
            parameter.copy_((parameter + 1) - 1)
        if parameter.ndim in (2, 3) and not re.search(_UNQUANTISED, name):
            is_turned = family == "gpt_oss" and parameter.ndim == 3
            rows = parameter.data.mT if is_turned else parameter.data
            for each in stored(name, rows, model.config):
                blocks_of = gguf.quants.quantize(each.contiguous().numpy(), Type[type_])
                each.copy_(torch.from_numpy(gguf.quants.dequantize(blocks_of, Type[type_])))
            if name.endswith("linear_attn.out_proj.weight"):
                rows.copy_(torch.from_numpy(tiled(rows.numpy().T, model.config, back=True).T))
    model.save_pretrained(folder)
    loader = auto_class(model.config)
    return loader.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def _number(type_: str) -> int:
    """The number of a type, with its sizes known to the package."""
    number = _NEWER.get(type_) or Type[type_]
    gguf.GGML_QUANT_SIZES.setdefault(number, TYPES[type_][1:])
    return number


def _encoded(name: str, array: np.ndarray, type_: str) -> np.ndarray:
    if type_ in _PLAIN:
        return array.astype(_PLAIN[type_])
    if type_ not in _ENCODED:
        count = array.size // TYPES[type_].num_weights
        return blocks(type_, count, crc32(name.encode())).reshape(*array.shape[:-1], -1)
    return gguf.quants.quantize(np.ascontiguousarray(array), Type[type_])


def blocks(type_: str, count: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type, uint8 [count, nbytes], of numbers about as large as those of the
    models."""
    rng = np.random.default_rng(seed)
    _, weights, nbytes = TYPES[type_]
    if type_ in _ENCODED:
        return gguf.quants.quantize(
            rng.normal(size=(count, weights)).astype(np.float32), Type[type_]
        )
    drawn = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    if type_ == "NVFP4":
        drawn[:, :4] &= 0xF
        return drawn
    scales = (rng.random((count, 1)) * _LARGEST.get(type_, 3e-4)).astype(np.float16)
    start = SCALES.get(type_, 0)
    if type_ == "IQ1_M":
        parts = scales.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 0xF
        drawn[:, start + 1 :: 2] = drawn[:, start + 1 :: 2] & 0xF | (parts << 4).astype(np.uint8)
        return drawn
    drawn[:, start : start + 2] = scales.view(np.uint8)
    if type_ in _MIDDLE:
        drawn[:, start + 2 : start + 4] = (scales * np.float16(_MIDDLE[type_])).view(np.uint8)
    return drawn


def every(type_: str, exceptions: Mapping[str, str] | None = None) -> Types:
    """One type for all tensors but those whose names hold one of the exceptions."""
    return lambda name: next(
        (other for part, other in (exceptions or {}).items() if part in name), type_
    )


def mixed(name: str) -> str:
    """The types of llama.cpp's Q4_K_M: some layers have their last projection in more bits."""
    if "ffn_down_exps" in name:
        return "Q6_K" if "blk.0" in name else "Q5_K"
    return "Q6_K" if name == "output.weight" else "Q4_K"


BY_PROJECTION = every(
    "IQ3_S",
    {
        "blk.0.ffn_gate_exps": "IQ1_S",
        "blk.0.ffn_up_exps": "IQ1_M",
        "blk.0.ffn_down_exps": "IQ2_XXS",
        "blk.1.ffn_gate_exps": "IQ2_XS",
        "blk.1.ffn_up_exps": "IQ2_S",
        "blk.1.ffn_down_exps": "IQ3_XXS",
        "attn_q.": "Q4_1",
        "attn_k.": "Q5_0",
        "attn_v.": "Q5_1",
        "attn_output.": "NVFP4",
        "token_embd.": "TQ1_0",
        "output.": "TQ2_0",
    },
)
"""Types that differ between projections and layers, as Unsloth's dynamic files have them."""
OF_FEW_BITS = every(
    "Q4_1",
    {
        "ffn_gate_exps": "IQ1_M",
        "blk.0.ffn_up_exps": "IQ2_XXS",
        "blk.1.ffn_up_exps": "Q1_0",
        "blk.0.ffn_down_exps": "Q2_0",
        "blk.1.ffn_down_exps": "IQ3_XXS",
    },
)
IN_MXFP4 = every("Q8_0", {"exps": "MXFP4", "experts": "MXFP4"})
"""Experts in MXFP4, by the names of the files and by the model's, as gpt-oss is published."""

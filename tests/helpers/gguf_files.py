"""Small random GGUF files of every architecture that is read, written by the package `gguf` as llama.cpp's
convert_hf_to_gguf.py lays them out."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from zlib import crc32

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.model.skeleton import auto_class
from tools.make.families import tiny

TOKENS = ["<pad>", "<bos>", "<eos>", *bytes_to_unicode().values(), "th"]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "mlp_only_layers": [],
    "num_experts": 6,
    "head_dim": 64,
}
_GROUPED = {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
OWN = {
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
_PLAIN = {"F32": np.float32, "F16": np.float16}
_MIDDLE = {"Q4_K": 7.5, "Q5_K": 15.5}  # of its codes

Types = Callable[[str], str]
"""The type of a tensor by its name in the file."""


def made(family: str) -> PreTrainedModel:
    """The model whose numbers, as far as a type can hold them, are in the files of `write`."""
    model = tiny(family, SIZES | OWN[family])
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
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
    """Write a model to `path`, or to files `-0000n-of-0000m.gguf` beside it; returns the path of the first.

    `change` may alter the arrays by their names, `describe` adds entries. Norms and routers are of float32, as
    llama.cpp writes them.
    """
    model = made(family)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]], split_max_tensors=_each(model, parts))
    _describe(writer, model)
    describe(writer)
    arrays = _arrays(model, ARCHITECTURES[family])
    change(arrays)
    for name, array in arrays.items():
        type_ = "F32" if array.ndim == 1 or re.search(r"ffn_gate_inp|\.bias", name) else types(name)
        data = _encoded(name, array, type_)
        writer.add_tensor(name, data, raw_dtype=None if type_ in _PLAIN else Type[type_])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def reference(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers' own loader of GGUF files dequantises it, in the sizes that it does not read."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.moe_intermediate_size = config.shared_expert_intermediate_size = SIZES["moe_intermediate_size"]
    loading = {"gguf_file": path.name, "config": config, "dtype": dtype, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path.parent, **loading).eval()


def _each(model: PreTrainedModel, parts: int) -> int:
    """The number of tensors in a part."""
    return 0 if parts == 1 else -(-(len(model.state_dict()) + model.config.num_hidden_layers) // parts)


def dequantised(family: str, folder: Path, types: Types, dtype: torch.dtype) -> PreTrainedModel:
    """The model of the numbers that are in a file of `write`, as transformers opens it from safetensors."""
    model = made(family)
    for name, parameter in model.named_parameters():
        type_ = types(name)
        if parameter.ndim in (2, 3) and not re.search(r"(gate|router)\.weight|_bias|\.visual\.", name):
            is_turned = family == "gpt_oss" and parameter.ndim == 3
            rows = parameter.data.mT if is_turned else parameter.data
            blocks_of = gguf.quants.quantize(rows.contiguous().numpy(), Type[type_])
            rows.copy_(torch.from_numpy(gguf.quants.dequantize(blocks_of, Type[type_])))
    model.save_pretrained(folder)
    loader = auto_class(model.config)
    return loader.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def _describe(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    num_further = getattr(config, "num_nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + num_further)
    if num_further:
        writer.add_nextn_predict_layers(num_further)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        scale_positions(writer, config.rope_parameters)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    writer.add_expert_used_count(config.num_experts_per_tok)
    _describe_experts(writer, config)
    if config.model_type not in ("qwen2_moe", "olmoe"):
        head_dim = SIZES["head_dim"]
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1)))
    _describe_tokenizer(writer)


def scale_positions(writer: gguf.GGUFWriter, scaling: Mapping[str, object]) -> None:
    """Say that positions are scaled by YaRN."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _describe_experts(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    if config.model_type in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe"):
        writer.add_expert_count(config.num_experts)
    elif config.model_type in ("mixtral", "minimax_m2", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
    elif config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        width = config.moe_num_shared_experts * config.moe_intermediate_size
        writer.add_expert_shared_feed_forward_length(width)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
    else:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.model_type in ("minimax_m2", "gpt_oss"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    elif hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type in ("dots1", "glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _describe_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _arrays(model: PreTrainedModel, architecture: gguf.MODEL_ARCH) -> dict[str, np.ndarray]:
    """The parameters by their names in a GGUF file, gate and up apart."""
    config = model.config.get_text_config()
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    arrays = {}
    if getattr(config, "num_nextn_predict_layers", 0):  # of a layer that predicts further tokens
        arrays[f"blk.{config.num_hidden_layers}.nextn.enorm.weight"] = np.ones(config.hidden_size, "f4")
    for stored, parameter in model.state_dict().items():
        if stored in model.all_tied_weights_keys or ".visual." in stored:
            continue
        name = stored.replace(".language_model.", ".")
        array = parameter.float().numpy()
        array = array.swapaxes(1, 2) if config.model_type == "gpt_oss" and array.ndim == 3 else array
        if found := re.search(r"\.(\d+)\..*gate_up_proj(_bias)?$", name):
            stem, ending = f"blk.{found[1]}.ffn", "bias" if found[2] else "weight"
            by_turns = (array[:, ::2], array[:, 1::2])
            gate, up = by_turns if config.model_type == "gpt_oss" else np.split(array, 2, 1)
            arrays[f"{stem}_gate_exps.{ending}"], arrays[f"{stem}_up_exps.{ending}"] = gate, up
        elif name.endswith("down_proj_bias"):
            arrays[f"blk.{name.split('.')[2]}.ffn_down_exps.bias"] = array
        elif name.endswith("e_score_correction_bias"):
            arrays[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = array.reshape(-1)
        else:
            stem, _, ending = name.rpartition(".")
            of_module = ending in ("weight", "bias")
            found = names.get_name(stem if of_module else name)
            arrays[f"{found}.{ending if of_module else 'weight'}"] = _laid_out(name, array, config)
    return arrays


def _laid_out(name: str, array: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """A parameter as the converter turns it."""
    if "shared_expert_gate" in name:
        return array[0]
    if not name.endswith("_proj.weight"):
        return array
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type == "mixtral" and heads:  # LlamaModel.permute
        return array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    return array


def _encoded(name: str, array: np.ndarray, type_: str) -> np.ndarray:
    if type_ in _PLAIN:
        return array.astype(_PLAIN[type_])
    if type_ in _MIDDLE or type_ == "Q6_K":
        return blocks(type_, array.size // 256, crc32(name.encode())).reshape(*array.shape[:-1], -1)
    return gguf.quants.quantize(np.ascontiguousarray(array), Type[type_])


def blocks(type_: str, count: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type, uint8 [count, nbytes], of numbers about as large as those of the models."""
    rng = np.random.default_rng(seed)
    weights, nbytes = gguf.GGML_QUANT_SIZES[Type[type_]]
    if type_ in ("Q8_0", "Q4_0", "MXFP4"):
        return gguf.quants.quantize(rng.normal(size=(count, weights)).astype(np.float32), Type[type_])
    drawn = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    scales = (rng.random((count, 1)) * 3e-4).astype(np.float16)
    if type_ == "Q6_K":
        drawn[:, -2:] = scales.view(np.uint8)
    else:
        drawn[:, :2] = scales.view(np.uint8)
        drawn[:, 2:4] = (scales * np.float16(_MIDDLE[type_])).view(np.uint8)
    return drawn


def every(type_: str, exceptions: Mapping[str, str] | None = None) -> Types:
    """One type for all tensors but those whose names hold one of the exceptions."""
    return lambda name: next((other for part, other in (exceptions or {}).items() if part in name), type_)


def mixed(name: str) -> str:
    """The types of llama.cpp's Q4_K_M: some layers have their last projection in more bits."""
    if "ffn_down_exps" in name:
        return "Q6_K" if "blk.0" in name else "Q5_K"
    return "Q6_K" if name == "output.weight" else "Q4_K"


IN_MXFP4 = every("Q8_0", {"exps": "MXFP4", "experts": "MXFP4"})
"""Experts in MXFP4, by the names of the files and by the model's, as gpt-oss is published."""

"""The arrays of the small GGUF files of tests, as llama.cpp's convert_hf_to_gguf.py lays them
out."""

import re

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel


def stored(name: str, rows: torch.Tensor, config: PreTrainedConfig) -> tuple[torch.Tensor, ...]:
    """Views of a matrix that have its numbers as they are stored."""
    if name.endswith("linear_attn.out_proj.weight"):
        rows.copy_(torch.from_numpy(tiled(rows.numpy().T, config).T))
    return _heads(rows, config) if "kv_b_proj" in name else (rows,)


def _heads(kv_b: torch.Tensor, config: PreTrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of k_b [heads, latent, k] and v_b [heads, v, latent] in a matrix."""
    keys, values = kv_b.unflatten(0, (config.num_attention_heads, -1)).split(
        (config.qk_nope_head_dim, config.v_head_dim), 1
    )
    return keys.mT, values


def stored_arrays(model: PreTrainedModel, architecture: gguf.MODEL_ARCH) -> dict[str, np.ndarray]:
    """The parameters by their names in a GGUF file, gate and up apart."""
    config = model.config.get_text_config()
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    arrays = {}
    if getattr(config, "num_nextn_predict_layers", 0):  # of a layer that predicts further tokens
        arrays[f"blk.{config.num_hidden_layers}.nextn.enorm.weight"] = np.ones(
            config.hidden_size, "f4"
        )
    for stored, parameter in model.state_dict().items():
        if stored in model.all_tied_weights_keys or ".visual." in stored:
            continue
        name = stored.replace(".language_model.", ".")
        array = parameter.float().numpy()
        array = (
            array.swapaxes(1, 2) if config.model_type == "gpt_oss" and array.ndim == 3 else array
        )
        if found := re.search(r"\.(\d+)\..*gate_up_proj(_bias)?$", name):
            stem = f"blk.{found[1]}.ffn"
            ending = "bias" if found[2] else "weight"
            by_turns = (array[:, ::2], array[:, 1::2])
            gate, up = by_turns if config.model_type == "gpt_oss" else np.split(array, 2, 1)
            arrays[f"{stem}_gate_exps.{ending}"] = gate
            arrays[f"{stem}_up_exps.{ending}"] = up
        elif own := _own_names(name, array, config):
            arrays |= {f"blk.{name.split('.')[2]}.{found}": each for found, each in own.items()}
        else:
            stem, _, ending = name.rpartition(".")
            of_module = ending in ("weight", "bias")
            found = names.get_name(stem if of_module else name)
            arrays[f"{found}.{ending if of_module else 'weight'}"] = _laid_out(name, array, config)
    return arrays


def _own_names(name: str, array: np.ndarray, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Parameters of a layer that the package does not name, or that the converter cuts, by their
    names behind the layer's."""
    if name.endswith("kv_b_proj.weight"):
        keys, values = _heads(torch.from_numpy(array), config)
        return {
            "attn_k_b.weight": keys.contiguous().numpy(),
            "attn_v_b.weight": values.contiguous().numpy(),
        }
    if ".linear_attn." in name:
        return _linear(name.partition(".linear_attn.")[2], array, config)
    if name.endswith("shared_mlp.input_linear.weight"):
        return dict(
            zip(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), np.split(array, 2), strict=True)
        )
    names = {
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "conv.conv.weight": "shortconv.conv.weight",
        "e_score_correction_bias": "exp_probs_b.bias",
        "expert_bias": "exp_probs_b.bias",
        "experts.down_proj": "ffn_down_exps.weight",
        "experts.down_proj_bias": "ffn_down_exps.bias",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    }
    own = next((theirs for ours, theirs in names.items() if name.endswith(ours)), None)
    if own == "exp_probs_b.bias":
        return {own: array.reshape(-1)}
    return (
        {} if own is None else {own: array.squeeze(1) if own == "shortconv.conv.weight" else array}
    )


def _linear(name: str, array: np.ndarray, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """A parameter of linear attention; llama.cpp has its value heads tiled, the module has them by
    key heads."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    names = {
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
        "in_proj_a.weight": "ssm_alpha.weight",
        "in_proj_b.weight": "ssm_beta.weight",
        "conv1d.weight": "ssm_conv1d.weight",
        "out_proj.weight": "ssm_out.weight",
        "A_log": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "norm.weight": "ssm_norm.weight",
    }
    if name == "out_proj.weight":
        array = tiled(array.T, config).T
    elif name in ("in_proj_qkv.weight", "conv1d.weight"):
        array = np.concatenate([array[:keys], tiled(array[keys:], config)]).squeeze()
    elif name != "norm.weight":
        array = tiled(array, config)
    return {
        names[name]: -torch.from_numpy(array).exp().numpy()
        if name == "A_log"
        else np.ascontiguousarray(array)
    }


def tiled(array: np.ndarray, config: PreTrainedConfig, *, back: bool = False) -> np.ndarray:
    """The value heads of an array [heads * n, ...] tiled, or back by key heads."""
    count = config.linear_num_key_heads
    each = config.linear_num_value_heads // config.linear_num_key_heads
    shape = (each, count) if back else (count, each)
    return array.reshape(*shape, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _laid_out(name: str, array: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """A parameter as the converter turns it."""
    if "shared_expert_gate" in name:
        return array[0]
    if config.model_type == "qwen3_5_moe_text" and name.endswith("norm.weight"):
        return array + 1
    if not name.endswith("_proj.weight"):
        return array
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    # LlamaModel.permute
    if config.model_type in ("mixtral", "granitemoe", "granitemoeshared") and heads:
        return array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    return array

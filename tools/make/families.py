"""Small random models of every family of transformers whose experts go through its experts
interface.

`tiny(family)` gives one in float32. `FAMILIES` has the config fields, by `model_type`, in which a
family differs from what it is given alike; fields that a config does not have are left out.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runtime.model.skeleton import auto_class

_ANY = {
    "d_model": 32,
    "depth": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "encoder_layers": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "image_size": 8,
    "initializer_range": 0.2,  # wide, or the experts of so narrow a model hardly move its logits
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "projection_hidden_dim": 32,
    "projection_hidden_size": 32,
    "text_hidden_size": 32,
}
"""Of every config, also of a vision tower."""
_TEXT = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "moe_hidden_size": 16,
    "moe_intermediate_size": 24,
    "moe_latent_size": 16,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_shared_expert_intermediate_size": 24,
    "moe_topk": 2,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_dense_layers": 0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 24,
    "sliding_window": 8,
    "ssm_state_size": 8,
    "top_k_experts": 2,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
}
"""Of the config of a text model."""
_LATENT = {"num_key_value_heads": 4}  # multi-head latent attention
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
_LINEAR_HEADS = {"linear_head_dim": 8, "linear_num_heads": 4}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "afmoe": {},
    "aria": {},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT | _LINEAR,
    "beam": _SPARSE,
    "cohere2_moe": {},
    "deepseek_ocr2": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {},
    "dots1": {},
    "dots3_note": {
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 16,
        },
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["dense", "dense"],
        },
    },
    "dots3_note_text": _LATENT
    | _SPARSE
    | {"layer_types": ["indexed_attention"] * 2, "n_group": 2, "per_layer_config": {}},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {"mlp_only_layers": []},
    "gemma4": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm4v_moe": {},
    "glm5_next": {},
    "glm_moe_dsa": _LATENT,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": _LINEAR,
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "inkling2": {},
    "inkling2_text": {},
    "inkling_mm_model": {},
    "inkling_text": {},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 0,
        "expert_layer_period": 1,
    },
    "kimi_k25": {},
    "kimi_linear": _LATENT | _LINEAR | _SPARSE | _LINEAR_HEADS,
    "kolibri1": {},
    "laguna": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "minimax_m3_vl_text": {},
    "mistral3": {"text_config": {"model_type": "mistral4"}},
    "mistral4": _LATENT,
    "mistral_large4": {},
    "mixtral": {},
    "muse_spark": {
        "audio_config": {"depths": [1, 1], "hidden_sizes": [32, 32], "patch_sizes": [4, 2]}
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_groups": 2,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe": {},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen3_omni_moe_thinker": {},
    "qwen3_vl_moe": {},
    "qwen4_exp": {},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "ple_layer_ids": [1],
        "split_ngram_parts": 4,
    },
    "solar_open": {},
    "unlimited_ocr": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
PARTS: Mapping[str, Mapping[str, object]] = {
    "deepseek_ocr2_text": _SPARSE,
    "glm4v_moe_text": {
        "rope_parameters": {
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 1.0,
            "rope_theta": 1e4,
            "rope_type": "default",
        }
    },
    "glm5_next_text": _LATENT
    | _LINEAR
    | _SPARSE
    | _LINEAR_HEADS
    | {"index_kpool": 4, "qk_rope_head_dim": 0, "index_topk": 16},
    "mistral_large4_text": _LATENT,
}
"""As `FAMILIES`, for text models that are published only within a multimodal one."""


PUBLISHED: Mapping[str, tuple[str, ...]] = {
    "fp8": (
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "minimax_m2",
        "mixtral",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_vl_moe",
    ),
    "mxfp4": ("gpt_oss",),
    "compressed-tensors": ("deepseek_v2", "deepseek_v3", "kimi_k25", "qwen3_moe"),
    "gptq": ("mixtral", "qwen2_moe"),
    "awq": ("mixtral",),
    "nvfp4": ("deepseek_v3", "qwen3_moe"),
}
"""By format: families that are published so and tested so; a multimodal one has the format in its
text_config."""
_INDEXED = "indexed_attention"
ALONE: Mapping[str, str] = {
    "axk2": _INDEXED,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": "heavily_compressed_attention",
    "dots3_note": _INDEXED,
    "dots3_note_text": _INDEXED,
    "glm5_next": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "hy_v4": _INDEXED,
    "inkling2": "hybrid_sliding",
    "inkling2_text": "hybrid_sliding",
    "inkling_mm_model": "hybrid_sliding",
    "inkling_text": "hybrid_sliding",
    "jamba": "",
    "mistral_large4": _INDEXED,
    "unlimited_ocr": "reference_sliding_attention",
    "zaya": "hybrid",
}
"""Families whose requests share no pass, and the kind of layer that prevents it, as `layer_types`
has it; "" for another reason."""


def tiny(
    family: str,
    sizes: Mapping[str, object] = MappingProxyType({}),
    own: Mapping[str, object] = MappingProxyType({}),
) -> PreTrainedModel:
    """A random model of a family, float32, in evaluation mode; multimodal ones have their vision
    tower. `sizes` replace fields of its text model that are alike for all families, and `own` those
    of the family."""
    given = {**FAMILIES[family], **own}
    config = _config(CONFIG_MAPPING[family], given, sizes, is_text=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(config).from_config(config, experts_implementation="eager").eval()
        for parameter in model.parameters():
            # norms and biases are born alike
            if parameter.numel() > 1 and parameter.data.unique().numel() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def _config(
    kind: type[PreTrainedConfig],
    own: Mapping[str, object],
    sizes: Mapping[str, object],
    *,
    is_text: bool,
) -> PreTrainedConfig:
    names = {field.name for field in fields(kind)}
    alike = _ANY | _TEXT | dict(sizes) if is_text else _ANY
    given = {name: value for name, value in alike.items() if name in names} | dict(own)
    for name, spec in getattr(kind, "sub_configs_defaults", {}).items():
        part = dict(own.get(name, {}))
        part_kind = spec if isinstance(spec, type) else spec.config_class
        published = (
            {}
            if isinstance(spec, type)
            else {k: v for k, v in spec.init_kwargs.items() if k not in _ANY | _TEXT}
        )
        default = None if isinstance(spec, type) else spec.model_type
        if part_family := part.pop("model_type", default):
            part_kind = CONFIG_MAPPING[part_family]
        mine = FAMILIES.get(part_kind.model_type) or PARTS.get(part_kind.model_type, {})
        given[name] = _config(part_kind, published | mine | part, sizes, is_text="text" in name)
    return kind(**given)

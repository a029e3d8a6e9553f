"""Tiny random text models of every family in transformers whose experts go through its experts
interface.

`TEXT_FAMILIES` are model types; `text_model(family, dtype)` makes one, seeded, without a
language-model head. The text parts of multimodal families count as families of their own.
Correction biases are not zero and tables of experts by token are random, so that a router which
leaves them out selects other experts.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from runtime.model.layers import moe_layers

_NUM_EXPERTS = 8
_TOP_K = 3
_NUM_LAYERS = 3
# What families call the same field: each takes those that its config has.
_FIELDS: dict[str, object] = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _NUM_EXPERTS
    ),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), _TOP_K),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "pad_token_id"), 0
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    "num_hidden_layers": _NUM_LAYERS,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "enable_moe_block": True,
}
_FEWER_HEADS = {"num_key_value_heads": 2}
_OWN: dict[str, dict[str, object]] = {
    "axk1": {"head_dim": 8},
    "beam": {"mlp_layer_types": ["sparse"] * _NUM_LAYERS},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v3": {"head_dim": 8},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "hash_moe", "moe"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "swa_kv_lora_rank": 16,
        "swa_q_lora_rank": 16,
    },
    "gemma4_text": {"num_experts_per_tok": _TOP_K},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        }
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "mlp_layer_types": ["sparse"] * _NUM_LAYERS},
    "inkling2_text": _FEWER_HEADS,
    "inkling_text": _FEWER_HEADS | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "mimo_v2_flash": _FEWER_HEADS,
    "zaya": {"num_experts_per_tok": 1},
}
_WITHOUT_EXPERTS = ("_vision", "_audio")


def _text_families() -> tuple[str, ...]:
    folder = Path(transformers.__file__).parent / "models"
    sources = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "use_experts_impl" in path.read_text()
    }
    types = (name for name in MODEL_MAPPING_NAMES if model_type_to_module_name(name) in sources)
    return tuple(
        name
        for name in types
        if not name.endswith(_WITHOUT_EXPERTS) and not CONFIG_MAPPING[name].sub_configs
    )


TEXT_FAMILIES = _text_families()


def text_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this type in evaluation mode; what the family keeps in float32 stays so."""
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    config = kind(
        **{name: value for name, value in _FIELDS.items() if name in known} | _OWN.get(family, {})
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
        for layer in moe_layers(model):
            block = model.get_submodule(layer.name.rpartition(".")[0])
            _roughen((*layer.gate.parameters(), *layer.gate.buffers()))
            _roughen((*block.parameters(recurse=False), *block.buffers(recurse=False)))
    kept = model._keep_in_fp32_modules_strict
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            tensor.data = tensor.to(dtype)
    return model


def _roughen(tensors: Iterable[torch.Tensor]) -> None:
    """Give constants, such as a correction bias, random values, and each token other experts."""
    for tensor in tensors:
        if tensor.data.unique().numel() > 1:
            continue
        if tensor.is_floating_point():
            tensor.data += 0.3 * torch.randn_like(tensor)
        else:
            tensor.copy_(torch.rand(len(tensor), _NUM_EXPERTS).argsort(-1)[:, : tensor.shape[1]])

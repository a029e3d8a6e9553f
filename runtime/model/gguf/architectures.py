"""Architectures of GGUF files that can be read, in the terms of transformers: their family, config
fields and names of tensors, as the package `gguf` (constants.py) and llama.cpp's
convert_hf_to_gguf.py write them."""

from collections.abc import Container, Mapping
from pathlib import Path

from artifacts.errors import BadInput
from runtime.model.gguf.layout import SIGMOID, SOFTMAX_OF_CHOSEN, Architecture, Entries


def _glm4_moe(own: Entries, tensors: Container[str]) -> dict[str, object]:
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


def _latent(own: Entries, tensors: Container[str]) -> dict[str, object]:
    """Return the sizes of heads. Files with k_b and v_b give the sizes of what is cached, and the
    sizes of heads in further entries."""
    turned = own["rope.dimension_count"]
    return {
        "head_dim": turned,
        "num_key_value_heads": own["attention.head_count"],
        "qk_nope_head_dim": own.get("attention.key_length_mla", own["attention.key_length"])
        - turned,
        "qk_rope_head_dim": turned,
        "topk_method": "group_limited_greedy" if own.get("expert_group_count", 1) > 1 else "greedy",
        "v_head_dim": own.get("attention.value_length_mla", own["attention.value_length"]),
    }


def _short_convolutions(own: Entries, tensors: Container[str]) -> dict[str, object]:
    """Return the types of layers, by their numbers of key-value heads, and that number. A layer
    without such heads is a convolution."""
    heads = own["attention.head_count_kv"]
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
    }


def _shared(module: str) -> tuple[tuple[str, str], ...]:
    """Return the patterns of the names of shared experts' tensors, with their names in `module`."""
    return tuple(
        (rf"\.ffn_{part}_shexp\.", f".mlp.{module}.{part}_proj.") for part in ("gate", "up", "down")
    )


_EXPERTS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_LOCAL_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "intermediate_size",
}
_GROUPED = {  # DeepSeek's router without its attention
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GROUPED_NAMES = (
    (r"\.exp_probs_b\.bias", ".mlp.gate.e_score_correction_bias"),
    *_shared("shared_experts"),
)
_QWEN3 = Architecture("qwen3_moe", _EXPERTS, fixed={"norm_topk_prob": True})

ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        "deepseek_v2",
        _GROUPED
        | {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"},
        (
            (r"\.attn_q_a_norm\.", ".self_attn.q_a_layernorm."),
            (r"\.attn_q_a\.", ".self_attn.q_a_proj."),
            (r"\.attn_q_b\.", ".self_attn.q_b_proj."),
            (r"\.attn_kv_a_norm\.", ".self_attn.kv_a_layernorm."),
            (r"\.attn_kv_a_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
            (r"\.attn_kv_b\.", ".self_attn.kv_b_proj."),
            *_GROUPED_NAMES,
        ),
        fixed={
            "n_group": 1,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
        counted=_latent,
        required=("attention.key_length", "attention.value_length", "rope.dimension_count"),
        usual={
            "attention.temperature_length": 0,
            "attention.temperature_scale": 0.0,
        },  # Mistral has others
        of_sigmoid="deepseek_v3",
        is_latent=True,
    ),
    "dots1": Architecture("dots1", _GROUPED, _GROUPED_NAMES, gating=SIGMOID),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            "expert_count": "moe_num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        (
            (r"\.exp_probs_b\.bias", ".mlp.gate.moe_statics.e_score_correction_bias"),
            *_shared("shared_experts"),
        ),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _GROUPED,
        _GROUPED_NAMES,
        counted=_glm4_moe,
        gating=SIGMOID,
        is_partly_turned=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _LOCAL_EXPERTS | {"attention.sliding_window": "sliding_window"},
        (
            (r"\.attn_sinks\.weight", ".self_attn.sinks"),
            (r"\.ffn_gate_inp\.", ".mlp.router."),
            (r"\.ffn_down_exps\.bias", ".mlp.experts.down_proj_bias"),
        ),
        fixed_scaling={"truncate": False},
        gating=SOFTMAX_OF_CHOSEN,
        takes_turns=True,
    ),
    "granitemoe": Architecture(
        "granitemoeshared",  # equals granitemoe where no expert is shared
        _LOCAL_EXPERTS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "feed_forward_length": "intermediate_size",
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
        },
        (
            (r"\.ffn_gate_inp\.", ".block_sparse_moe.router."),
            (r"\.ffn_down_shexp\.", ".shared_mlp.output_linear."),
        ),
        required=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
        usual={"rope.scaling.finetuned": True},  # or there are no positions
        shared_gate_up=".shared_mlp.input_linear.weight",
        experts="block_sparse_moe.experts",
        is_permuted=True,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        (
            (r"\.attn_q_norm\.", ".self_attn.query_layernorm."),
            (r"\.attn_k_norm\.", ".self_attn.key_layernorm."),
            (r"\.ffn_gate_inp\.", ".mlp.gate.wg."),
            *_shared("shared_mlp"),
        ),
        counted=lambda own, _: {"head_dim": head_dim(own)},
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _EXPERTS
        | {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
        },
        (
            (r"^token_embd_norm\.", "model.embedding_norm."),
            (r"\.attn_norm\.", ".operator_norm."),
            (r"\.attn_output\.", ".self_attn.out_proj."),
            (r"\.attn_q_norm\.", ".self_attn.q_layernorm."),
            (r"\.attn_k_norm\.", ".self_attn.k_layernorm."),
            (r"\.shortconv\.(in|out)_proj\.", r".conv.\1_proj."),
            (r"\.ffn_norm\.", ".ffn_norm."),
            (r"\.ffn_gate\.", ".feed_forward.w1."),
            (r"\.ffn_up\.", ".feed_forward.w3."),
            (r"\.ffn_down\.", ".feed_forward.w2."),
            (r"\.ffn_gate_inp\.", ".feed_forward.gate."),
            (r"\.exp_probs_b\.bias", ".feed_forward.expert_bias"),
        ),
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        counted=_short_convolutions,
        gating=SIGMOID,
        experts="feed_forward.experts",
    ),
    "llama": Architecture("mixtral", _LOCAL_EXPERTS, is_permuted=True),
    "minimax-m2": Architecture(
        "minimax_m2",
        _LOCAL_EXPERTS,
        ((r"\.exp_probs_b\.bias", ".mlp.e_score_correction_bias"),),
        gating=SIGMOID,
        is_partly_turned=True,
    ),
    "olmoe": Architecture("olmoe", _EXPERTS, fixed={"norm_topk_prob": False}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        ((r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."), *_shared("shared_expert")),
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _EXPERTS
        | {
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "full_attention_interval": "full_attention_interval",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        counted=lambda own, _: {
            "linear_value_head_dim": own["ssm.inner_size"] // own["ssm.time_step_rank"]
        },
        required=("full_attention_interval", "ssm.inner_size", "ssm.time_step_rank"),
        usual={"attention.recurrent_layers": None},  # other layers than every so many
        is_partly_turned=True,
        has_rules=True,
    ),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,  # its language model; a text's three positions are one
}
"""Architectures by the name that files give, `general.architecture`."""


def head_dim(own: Entries) -> int:
    """Return the size of a head, where attention is not latent."""
    return own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]


def architecture_of(
    path: Path, entries: Mapping[str, object]
) -> tuple[Architecture, dict[str, object]]:
    """Return the architecture of a file, and its own entries without their prefix. Raises BadInput
    for an architecture that is not read, and for a model without experts."""
    name = str(entries.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise BadInput(
            f"{path} is a GGUF file of {name[:40]}: moectl reads {', '.join(ARCHITECTURES)}"
        )
    if not entries.get(f"{name}.expert_count"):
        raise BadInput(
            f"{path} has no experts ({name}.expert_count): moectl runs Mixture-of-Experts models"
        )
    prefix = f"{name}."
    own = {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}
    return ARCHITECTURES[name].of(own), own

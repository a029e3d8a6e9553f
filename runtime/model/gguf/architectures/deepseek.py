"""Architectures of DeepSeek-V2, V3, R1 and Kimi-K2."""

from runtime.model.gguf.layout import GROUPED, GROUPED_NAMES, Architecture, Entries, Rule, Tensors


def _latent(own: Entries, tensors: Tensors) -> dict[str, object]:
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


ARCHITECTURES = {
    "deepseek2": Architecture(
        "deepseek_v2",
        GROUPED
        | {"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"},
        (
            (r"\.attn_q_a_norm\.", ".self_attn.q_a_layernorm."),
            (r"\.attn_q_a\.", ".self_attn.q_a_proj."),
            (r"\.attn_q_b\.", ".self_attn.q_b_proj."),
            (r"\.attn_kv_a_norm\.", ".self_attn.kv_a_layernorm."),
            (r"\.attn_kv_a_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
            (r"\.attn_kv_b\.", ".self_attn.kv_b_proj."),
            *GROUPED_NAMES,
        ),
        (
            Rule(
                (r"\.attn_k_b\.weight", r"\.attn_v_b\.weight"),
                ".self_attn.kv_b_proj.weight",
                ("join_heads",),
            ),
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
}

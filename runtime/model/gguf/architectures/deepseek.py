"""Architectures of DeepSeek-V2, V3, V3.2, R1, V4 and Kimi-K2."""

from runtime.model.gguf.layout import (
    GROUPED,
    GROUPED_NAMES,
    SIGMOID,
    SQRT_SOFTPLUS,
    Architecture,
    Entries,
    Rule,
    Tensors,
    kinds_of_mlp,
    num_layers,
)


def latent(own: Entries, tensors: Tensors) -> dict[str, object]:
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


def by_layer(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the types of layers' experts and indexers, the latter if the file says them."""
    fields: dict[str, object] = {"mlp_layer_types": kinds_of_mlp(own, tensors)}
    if (chooses := own.get("attention.indexer.types")) is not None:
        fields["indexer_types"] = [
            "full" if is_full else "shared" for is_full in chooses[: num_layers(own)]
        ]
    return fields


def clamped(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the limit of gates, which is alike in all layers."""
    (limit,) = {*own["swiglu_clamp_exp"], *own.get("swiglu_clamp_shexp", ())}
    return {"swiglu_limit": limit}


STREAMS = {  # hyper-connections (DeepSeek-V4)
    "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
}
STREAMS_NAMES = (
    (r"\.hc_attn_(\w+)\.weight", r".attn_hc.\1"),
    (r"\.hc_ffn_(\w+)\.weight", r".ffn_hc.\1"),
)
_COMPRESSOR = ".self_attn.compressor."

LATENT = GROUPED | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
}
LATENT_NAMES = (
    (r"\.attn_q_a_norm\.", ".self_attn.q_a_layernorm."),
    (r"\.attn_q_a\.", ".self_attn.q_a_proj."),
    (r"\.attn_q_b\.", ".self_attn.q_b_proj."),
    (r"\.attn_kv_a_norm\.", ".self_attn.kv_a_layernorm."),
    (r"\.attn_kv_a_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    (r"\.attn_kv_b\.", ".self_attn.kv_b_proj."),
    *GROUPED_NAMES,
)
LATENT_RULES = (
    Rule(
        (r"\.attn_k_b\.weight", r"\.attn_v_b\.weight"),
        ".self_attn.kv_b_proj.weight",
        ("join_heads",),
    ),
)
REQUIRED = ("attention.key_length", "attention.value_length", "rope.dimension_count")
INDEXED = LATENT | {  # of the indexer of sparse attention (DeepSeek-V3.2)
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
INDEXED_NAMES = (
    (r"\.indexer\.attn_q_b\.", ".self_attn.indexer.wq_b."),
    (r"\.indexer\.attn_k\.", ".self_attn.indexer.wk."),
    (r"\.indexer\.k_norm\.", ".self_attn.indexer.k_norm."),
    (r"\.indexer\.proj\.", ".self_attn.indexer.weights_proj."),
    (r"\.attn_k\.", ".self_attn.k_proj."),  # after the indexer's
    *LATENT_NAMES,
)

ARCHITECTURES = {
    "deepseek2": Architecture(
        "deepseek_v2",
        LATENT,
        LATENT_NAMES,
        LATENT_RULES,
        fixed={
            "n_group": 1,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
        counted=latent,
        required=REQUIRED,
        usual={
            "attention.temperature_length": 0,
            "attention.temperature_scale": 0.0,
        },  # Mistral has others
        of_sigmoid="deepseek_v3",
        is_latent=True,
    ),
    "deepseek32": Architecture(
        "deepseek_v32",
        INDEXED,
        INDEXED_NAMES,
        LATENT_RULES,
        counted=latent,
        required=REQUIRED,
        gating=SIGMOID,
        is_latent=True,
    ),
    "deepseek4": Architecture(
        "deepseek_v4",
        INDEXED
        | STREAMS
        | {
            "attention.compress_ratios": "compress_ratios",
            "attention.compress_rope_freq_base": "compress_rope_theta",
            "attention.output_group_count": "o_groups",
            "attention.output_lora_rank": "o_lora_rank",
            "attention.sliding_window": "sliding_window",
            "hash_layer_count": "num_hash_layers",
        },
        (
            *STREAMS_NAMES,
            (r"^output_hc_(\w+)\.weight", r"model.hc_head.hc_\1"),
            (r"\.attn_compressor_ape\.weight", f"{_COMPRESSOR}position_bias"),
            (r"\.attn_compressor_(gate|kv)\.", rf"{_COMPRESSOR}\1_proj."),
            (r"\.attn_compressor_norm\.", f"{_COMPRESSOR}kv_norm."),
            (r"\.indexer_compressor_ape\.weight", f"{_COMPRESSOR}indexer.position_bias"),
            (r"\.indexer_compressor_(gate|kv)\.", rf"{_COMPRESSOR}indexer.\1_proj."),
            (r"\.indexer_compressor_norm\.", f"{_COMPRESSOR}indexer.kv_norm."),
            (r"\.indexer\.proj\.", f"{_COMPRESSOR}indexer.scorer.weights_proj."),
            (r"\.indexer\.attn_q_b\.", f"{_COMPRESSOR}indexer.q_b_proj."),
            (r"\.attn_sinks\.weight", ".self_attn.sinks"),
            (r"\.attn_q_a_norm\.", ".self_attn.q_a_norm."),
            (r"\.attn_kv_a_norm\.", ".self_attn.kv_norm."),
            (r"\.attn_(q_a|q_b|kv)\.", r".self_attn.\1_proj."),
            (r"\.attn_output_(a|b)\.", r".self_attn.o_\1_proj."),
            (r"\.ffn_gate_tid2eid\.weight", ".mlp.gate.tid2eid"),
            *GROUPED_NAMES,
        ),
        counted=clamped,
        required=("attention.compress_ratios", "swiglu_clamp_exp"),
        usual={"expert_weights_norm": True},
        gating=SQRT_SOFTPLUS,
        is_partly_turned=True,
    ),
}

"""Architectures of LFM2."""

from runtime.model.gguf.layout import EXPERTS, SIGMOID, Architecture, Entries, Rule, Tensors


def _short_convolutions(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the types of layers, by their numbers of key-value heads, and that number. A layer
    without such heads is a convolution."""
    heads = own["attention.head_count_kv"]
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
    }


ARCHITECTURES = {
    "lfm2moe": Architecture(
        "lfm2_moe",
        EXPERTS
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
        (Rule((r"\.shortconv\.conv\.weight",), ".conv.conv.weight", ("unsqueeze",)),),
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        counted=_short_convolutions,
        gating=SIGMOID,
        experts="feed_forward.experts",
    ),
}

"""Architectures of Hunyuan-A13B."""

from runtime.model.gguf.layout import Architecture, head_dim, shared

ARCHITECTURES = {
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        (
            (r"\.attn_q_norm\.", ".self_attn.query_layernorm."),
            (r"\.attn_k_norm\.", ".self_attn.key_layernorm."),
            (r"\.ffn_gate_inp\.", ".mlp.gate.wg."),
            *shared("shared_mlp"),
        ),
        counted=lambda own, _: {"head_dim": head_dim(own)},
    ),
}

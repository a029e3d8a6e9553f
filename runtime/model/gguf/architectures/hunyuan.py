"""Architectures of Hunyuan-A13B and Hy3."""

from runtime.model.gguf.layout import (
    EXPERTS,
    SIGMOID,
    Architecture,
    Entries,
    Tensors,
    head_dim,
    kinds_of_mlp,
    shared,
)


def _hy3(own: Entries, tensors: Tensors) -> dict[str, object]:
    shared_size = own["expert_shared_feed_forward_length"]
    return {
        "mlp_layer_types": kinds_of_mlp(own, tensors),
        "num_shared_experts": shared_size // own["expert_feed_forward_length"],
    }


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
    "hy_v3": Architecture(
        "hy_v3",
        EXPERTS | {"expert_weights_scale": "router_scaling_factor"},
        (
            (r"\.exp_probs_b(\.bias)?$", ".mlp.e_score_correction_bias"),
            *shared("shared_experts"),
        ),
        counted=_hy3,
        required=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
        usual={"expert_weights_norm": True},
        gating=SIGMOID,
    ),
}

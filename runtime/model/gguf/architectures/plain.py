"""Architectures of Mixtral, OLMoE, dots.llm1, K-EXAONE and Arcee's Trinity, whose names and fields
are mostly shared ones."""

from runtime.model.gguf.layout import (
    EXPERTS,
    GROUPED,
    GROUPED_NAMES,
    LOCAL_EXPERTS,
    PERMUTED,
    SIGMOID,
    Architecture,
    Entries,
    Tensors,
    kinds_of_attention,
    kinds_of_mlp,
    shared,
)


def _exaone(own: Entries, tensors: Tensors) -> dict[str, object]:
    return {"layer_types": kinds_of_attention(own), "mlp_layer_types": kinds_of_mlp(own, tensors)}


ARCHITECTURES = {
    "afmoe": Architecture(
        "afmoe",
        EXPERTS
        | {
            "attention.sliding_window": "sliding_window",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
        (
            (r"\.attn_gate\.", ".self_attn.gate_proj."),
            (r"\.exp_probs_b\.bias", ".mlp.expert_bias"),
            (r"\.ffn_gate_inp\.", ".mlp.router.gate."),
            (r"\.ffn_norm\.", ".pre_mlp_layernorm."),
            (r"\.post_ffw_norm\.", ".post_mlp_layernorm."),
            *shared("shared_experts"),
        ),
        fixed={"mup_enabled": True},
        usual={
            "attention.sliding_window_pattern": None,  # three layers of four
            "expert_weights_norm": True,
        },
        gating=SIGMOID,
    ),
    "dots1": Architecture("dots1", GROUPED, GROUPED_NAMES, gating=SIGMOID),
    "exaone-moe": Architecture(
        "exaone_moe",
        GROUPED
        | {
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
        },
        GROUPED_NAMES,
        counted=_exaone,
        required=("attention.sliding_window_pattern",),
        gating=SIGMOID,
    ),
    "llama": Architecture("mixtral", LOCAL_EXPERTS, own_rules=PERMUTED),
    "olmoe": Architecture("olmoe", EXPERTS, fixed={"norm_topk_prob": False}),
}

"""Architecture of Arcee's Trinity models."""

from runtime.model.gguf.layout import EXPERTS, SIGMOID, Architecture, shared

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
}

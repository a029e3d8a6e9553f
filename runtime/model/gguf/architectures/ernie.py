"""Architectures of ERNIE 4.5."""

from runtime.model.gguf.layout import Architecture, Rule, shared

ARCHITECTURES = {
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
        shared("shared_experts"),
        (
            Rule(
                (r"\.exp_probs_b\.bias",),
                ".mlp.gate.moe_statics.e_score_correction_bias",
                ("as_row",),
            ),
        ),
    ),
}

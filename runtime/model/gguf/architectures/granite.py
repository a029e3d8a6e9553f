"""Architectures of Granite 3."""

from runtime.model.gguf.layout import LOCAL_EXPERTS, PERMUTED, Architecture, shared_gate_up

ARCHITECTURES = {
    "granitemoe": Architecture(
        "granitemoeshared",  # equals granitemoe where no expert is shared
        LOCAL_EXPERTS
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
        (*PERMUTED, shared_gate_up(".shared_mlp.input_linear.weight")),
        required=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
        usual={"rope.scaling.finetuned": True},  # or there are no positions
        experts="block_sparse_moe.experts",
    ),
}

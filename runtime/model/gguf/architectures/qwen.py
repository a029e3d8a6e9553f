"""Architectures of Qwen2, Qwen3 and Qwen3.5."""

from runtime.model.gguf.layout import EXPERTS, Architecture, shared

_QWEN3 = Architecture("qwen3_moe", EXPERTS, fixed={"norm_topk_prob": True})

ARCHITECTURES = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        ((r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."), *shared("shared_expert")),
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        EXPERTS
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

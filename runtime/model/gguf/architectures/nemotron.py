"""Architecture of Nemotron-H with experts: Mamba-2, attention or experts a layer."""

from runtime.model.gguf.layout import (
    GROUPED,
    SIGMOID,
    Architecture,
    Entries,
    Rule,
    Tensors,
    num_layers,
)


def _counted(own: Entries, tensors: Tensors) -> dict[str, object]:
    heads = own["attention.head_count_kv"]
    widths = own["feed_forward_length"]
    return {
        "intermediate_size": max(widths),
        "layers_block_type": [
            "full_attention" if heads[layer] else "moe" if widths[layer] else "linear_attention"
            for layer in range(num_layers(own))
        ],
        "mamba_head_dim": own["ssm.inner_size"] // own["ssm.time_step_rank"],
        "num_key_value_heads": max(heads),
    }


ARCHITECTURES = {
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        GROUPED
        | {
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.group_count": "n_groups",
            "ssm.state_size": "ssm_state_size",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        (
            (r"^output_norm\.", "model.norm_f."),
            (r"^token_embd\.", "model.embeddings."),
            (r"\.attn_k\.", ".mixer.k_proj."),
            (r"\.attn_norm\.", ".norm."),
            (r"\.attn_output\.", ".mixer.o_proj."),
            (r"\.attn_q\.", ".mixer.q_proj."),
            (r"\.attn_v\.", ".mixer.v_proj."),
            (r"\.exp_probs_b\.bias", ".mixer.gate.e_score_correction_bias"),
            (r"\.ffn_(down|up)_shexp\.", r".mixer.shared_experts.\1_proj."),
            (r"\.ffn_gate_inp\.", ".mixer.gate."),
            (r"\.ffn_latent_down\.", ".mixer.fc1_latent_proj."),
            (r"\.ffn_latent_up\.", ".mixer.fc2_latent_proj."),
            (r"\.ffn_up_exps\.weight", ".mixer.experts.up_proj"),
            (r"\.ssm_(in|out)\.", r".mixer.\1_proj."),
            (r"\.ssm_conv1d\.bias", ".mixer.conv1d.bias"),
            (r"\.ssm_dt\.bias", ".mixer.dt_bias"),
        ),
        own_rules=(
            Rule((r"\.ssm_a$",), ".mixer.A_log", ("flatten", "log_negate", "cast")),
            Rule((r"\.ssm_conv1d\.weight",), ".mixer.conv1d.weight", ("unsqueeze",)),
            Rule((r"\.ssm_d$",), ".mixer.D", ("flatten",)),
            Rule((r"\.ssm_norm\.weight",), ".mixer.norm.weight", ("flatten",)),
        ),
        counted=_counted,
        required=("ssm.inner_size", "ssm.time_step_rank"),
        usual={"rope.scaling.finetuned": False},  # there are no positions
        gating=SIGMOID,
        experts="mixer.experts",
        gate_up=(),
    ),
}

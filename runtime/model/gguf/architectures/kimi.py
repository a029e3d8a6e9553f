"""Architectures of Kimi-Linear."""

from runtime.model.gguf.architectures.deepseek import (
    LATENT,
    LATENT_NAMES,
    LATENT_RULES,
    REQUIRED,
    latent,
)
from runtime.model.gguf.layout import SIGMOID, Architecture, Entries, Rule, Tensors, num_layers

KDA = {"kda.head_dim": "linear_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim"}
KDA_NAMES = (  # Kimi Delta Attention (Kimi Linear, arXiv:2510.26692)
    (r"\.ssm_f_(\w)\.", r".self_attn.forget_gate.f_\1_proj."),
    (r"\.ssm_dt\.bias", ".self_attn.forget_gate.dt_bias"),
    (r"\.ssm_beta\.", ".self_attn.b_proj."),
    (r"\.ssm_g_(\w)\.", r".self_attn.g_\1_proj."),
    (r"\.ssm_norm\.", ".self_attn.o_norm."),
)
KDA_RULES = (
    Rule(
        tuple(rf"\.ssm_conv1d_{part}\.weight" for part in "qkv"),
        ".self_attn.conv1d.weight",
        ("concatenate", "by_channel"),
    ),
)


def linear_layers(own: Entries, other: str) -> dict[str, object]:
    """Return the types of layers, of which those without key-value heads are linear."""
    heads = own["attention.head_count_kv"]
    return {
        "layer_types": [
            other if count else "linear_attention" for count in heads[: num_layers(own)]
        ],
        "linear_num_heads": own["attention.head_count"],
    }


def _kimi_linear(own: Entries, tensors: Tensors) -> dict[str, object]:
    return latent(own, tensors) | linear_layers(own, "full_attention")


ARCHITECTURES = {
    "kimi-linear": Architecture(
        "kimi_linear",
        LATENT | KDA | {"expert_count": "num_local_experts"},
        (*KDA_NAMES, *LATENT_NAMES),
        (
            *LATENT_RULES,
            *KDA_RULES,
            Rule(
                (r"\.ssm_a$",),
                ".self_attn.forget_gate.A_log",
                ("log_negate", "by_head", "cast"),
            ),
        ),
        fixed={"norm_topk_prob": True},
        counted=_kimi_linear,
        required=REQUIRED,
        gating=SIGMOID,
        is_latent=True,
    ),
}

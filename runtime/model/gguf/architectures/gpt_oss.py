"""Architectures of gpt-oss."""

from runtime.model.gguf.layout import LOCAL_EXPERTS, SOFTMAX_OF_CHOSEN, Architecture

ARCHITECTURES = {
    "gpt-oss": Architecture(
        "gpt_oss",
        LOCAL_EXPERTS | {"attention.sliding_window": "sliding_window"},
        (
            (r"\.attn_sinks\.weight", ".self_attn.sinks"),
            (r"\.ffn_gate_inp\.", ".mlp.router."),
            (r"\.ffn_down_exps\.bias", ".mlp.experts.down_proj_bias"),
        ),
        fixed_scaling={"truncate": False},
        gating=SOFTMAX_OF_CHOSEN,
        gate_up=("concatenate_each", "by_turns"),
    ),
}

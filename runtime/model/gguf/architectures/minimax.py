"""Architectures of MiniMax-M2."""

from runtime.model.gguf.layout import LOCAL_EXPERTS, SIGMOID, Architecture

ARCHITECTURES = {
    "minimax-m2": Architecture(
        "minimax_m2",
        LOCAL_EXPERTS,
        ((r"\.exp_probs_b\.bias", ".mlp.e_score_correction_bias"),),
        gating=SIGMOID,
        is_partly_turned=True,
    ),
}

"""Architectures of GLM-4.5 and later."""

from runtime.model.gguf.layout import (
    GROUPED,
    GROUPED_NAMES,
    SIGMOID,
    Architecture,
    Entries,
    Tensors,
)


def _glm4_moe(own: Entries, tensors: Tensors) -> dict[str, object]:
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


ARCHITECTURES = {
    "glm4moe": Architecture(
        "glm4_moe",
        GROUPED,
        GROUPED_NAMES,
        counted=_glm4_moe,
        gating=SIGMOID,
        is_partly_turned=True,
    ),
}

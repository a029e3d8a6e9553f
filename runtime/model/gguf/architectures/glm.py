"""Architectures of GLM-4.5 and later."""

from collections.abc import Container

from runtime.model.gguf.layout import GROUPED, GROUPED_NAMES, SIGMOID, Architecture, Entries


def _glm4_moe(own: Entries, tensors: Container[str]) -> dict[str, object]:
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

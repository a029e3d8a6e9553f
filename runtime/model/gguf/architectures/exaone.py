"""Architecture of K-EXAONE."""

from runtime.model.gguf.layout import (
    GROUPED,
    GROUPED_NAMES,
    SIGMOID,
    Architecture,
    Entries,
    Tensors,
    kinds_of_attention,
    kinds_of_mlp,
)


def _counted(own: Entries, tensors: Tensors) -> dict[str, object]:
    return {"layer_types": kinds_of_attention(own), "mlp_layer_types": kinds_of_mlp(own, tensors)}


ARCHITECTURES = {
    "exaone-moe": Architecture(
        "exaone_moe",
        GROUPED
        | {
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
        },
        GROUPED_NAMES,
        counted=_counted,
        required=("attention.sliding_window_pattern",),
        gating=SIGMOID,
    ),
}

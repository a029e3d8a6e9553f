"""Architecture of Laguna."""

from runtime.model.gguf.layout import (
    EXPERTS,
    GROUPED_NAMES,
    SIGMOID,
    Architecture,
    Entries,
    Tensors,
    kinds_of_mlp,
    num_layers,
)

_PERIOD = 4  # the first of so many layers sees all tokens (llama.cpp's laguna.cpp)


def _by_layer(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the kinds of layers, their heads, and the positions of each kind."""
    heads = own["attention.head_count"]
    has_window = bool(own.get("attention.sliding_window"))
    is_by_head = tensors["blk.0.attn_gate.weight"].shape[0] == heads[0]
    size = own["attention.key_length"]
    return {
        "gating": True if is_by_head else "per-element",
        "layer_types": [
            "sliding_attention" if has_window and layer % _PERIOD else "full_attention"
            for layer in range(num_layers(own))
        ],
        "mlp_layer_types": kinds_of_mlp(own, tensors),
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": heads,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": own["rope.dimension_count"] / size,
                "rope_theta": own["rope.freq_base"],
            },
            "sliding_attention": {
                "partial_rotary_factor": own.get("rope.dimension_count_swa", size) / size,
                "rope_theta": own.get("rope.freq_base_swa", own["rope.freq_base"]),
                "rope_type": "default",
            },
        },
    }


ARCHITECTURES = {
    "laguna": Architecture(
        "laguna",
        EXPERTS
        | {
            "attention.sliding_window": "sliding_window",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_scale": "moe_routed_scaling_factor",
        },
        ((r"\.attn_gate\.", ".self_attn.g_proj."), *GROUPED_NAMES),
        counted=_by_layer,
        required=("attention.key_length", "rope.dimension_count", "rope.freq_base"),
        usual={"attention.sliding_window_pattern": None, "expert_weights_norm": True},
        gating=SIGMOID,
        is_partly_turned=True,
    ),
}

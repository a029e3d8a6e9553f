"""Architecture of MiMo-V2 and later."""

from runtime.model.gguf.layout import (
    GROUPED,
    GROUPED_NAMES,
    SIGMOID,
    Architecture,
    Entries,
    Tensors,
    kinds_of_attention,
    kinds_of_mlp,
    num_layers,
)


def _by_kind(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the kinds of layers, and the positions and heads that differ between them: layers
    that see a window have twice the key-value heads, as transformers' class has it."""
    turned = own["rope.dimension_count"] / own["attention.key_length"]
    bases = {
        "full_attention": own["rope.freq_base"],
        "sliding_attention": own["rope.freq_base_swa"],
    }
    return {
        "layer_types": kinds_of_attention(own),
        "mlp_layer_types": kinds_of_mlp(own, tensors),
        "num_key_value_heads": min(own["attention.head_count_kv"][: num_layers(own)]),
        "rope_parameters": {
            kind: {"partial_rotary_factor": turned, "rope_theta": base, "rope_type": "default"}
            for kind, base in bases.items()
        },
    }


ARCHITECTURES = {
    "mimo2": Architecture(
        "mimo_v2_flash",
        GROUPED
        | {
            "attention.sliding_window": "sliding_window",
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
        },
        ((r"\.attn_sinks\.weight", ".self_attn.sinks"), *GROUPED_NAMES),
        fixed={"attention_value_scale": None},
        counted=_by_kind,
        required=(
            "attention.head_count_kv",
            "attention.key_length",
            "attention.sliding_window_pattern",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.freq_base_swa",
        ),
        gating=SIGMOID,
        is_partly_turned=True,
    ),
}

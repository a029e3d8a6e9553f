"""Architectures of MiniMax-M2 and M3."""

from runtime.model.gguf.layout import (
    LOCAL_EXPERTS,
    SIGMOID,
    Architecture,
    Entries,
    Rule,
    Tensors,
    from_zero,
    kinds_of_mlp,
    num_layers,
    shared_gate_up,
)


def _sparse(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the types of layers: the first ones are dense, and those with experts attend to blocks
    of tokens that an indexer chooses."""
    kinds = kinds_of_mlp(own, tensors)
    last = num_layers(own) - 1
    return {
        "layer_types": [
            "full_attention" if kind == "dense" else "minimax_m3_sparse" for kind in kinds
        ],
        "mlp_layer_types": kinds,
        "shared_intermediate_size": tensors[f"blk.{last}.ffn_gate_shexp.weight"].shape[0],
    }


ARCHITECTURES = {
    "minimax-m2": Architecture(
        "minimax_m2",
        LOCAL_EXPERTS,
        ((r"\.exp_probs_b\.bias", ".mlp.e_score_correction_bias"),),
        gating=SIGMOID,
        is_partly_turned=True,
    ),
    "minimax-m3": Architecture(
        "minimax_m3_vl_text",
        LOCAL_EXPERTS
        | {
            "attention.indexer.block_size": "index_block_size",
            "attention.indexer.head_count": "index_n_heads",
            "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.local_blocks": "index_local_blocks",
            "attention.indexer.top_k": "index_topk_blocks",
            "expert_weights_scale": "routed_scaling_factor",
            "feed_forward_length": "dense_intermediate_size",
            "rope.dimension_count": "rotary_dim",
        },
        (
            (r"\.exp_probs_b\.bias", ".mlp.gate.e_score_correction_bias"),
            (r"\.ffn_down_shexp\.", ".mlp.shared_experts.down_proj."),
            (r"\.indexer\.(\w+)\.", r".self_attn.indexer.\1."),
        ),
        (
            Rule(
                (r"\.mlp\.gate_proj\.weight", r"\.mlp\.up_proj\.weight"),
                ".mlp.gate_up_proj.weight",
                ("concatenate",),
            ),
            *from_zero("layernorm", "model.norm", "self_attn.q_norm", "self_attn.k_norm"),
            *from_zero("indexer.q_norm", "indexer.k_norm"),
            shared_gate_up(".mlp.shared_experts.gate_up_proj.weight"),
        ),
        counted=_sparse,
        required=("expert_weights_scale",),
        usual={"expert_weights_norm": True},
        gating=SIGMOID,
        is_partly_turned=True,
    ),
}

"""Architectures of Gemma 4."""

from runtime.model.gguf.layout import EXPERTS, Architecture, Entries, Tensors, kinds_of_attention


def _by_kind(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the types of layers, and what differs between them: numbers of key-value heads, and
    the positions. A file has a factor for each frequency, which is 1 where a head is turned."""
    is_sliding = own["attention.sliding_window_pattern"]
    depth = own["block_count"]
    heads = own["attention.head_count_kv"]
    heads = dict(
        zip(is_sliding, heads if isinstance(heads, list) else [heads] * depth, strict=True)
    )
    factors = own["rope_freqs"]
    own_keys = range(depth - own.get("attention.shared_kv_layers", 0))
    full = [layer for layer in own_keys if not is_sliding[layer]]
    table = tensors.get("per_layer_token_embd.weight")
    return {
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in tensors for layer in full),
        "layer_types": kinds_of_attention(own),
        "num_global_key_value_heads": heads.get(False),
        "num_key_value_heads": heads.get(True, heads.get(False)),
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": factors.count(1) / len(factors),
                "rope_theta": own["rope.freq_base"],
                "rope_type": "proportional",
            },
            "sliding_attention": {
                "rope_theta": own["rope.freq_base_swa"],
                "rope_type": "default",
            },
        },
        "vocab_size_per_layer_input": table.shape[0] if table else 0,
    }


ARCHITECTURES = {
    "gemma4": Architecture(
        "gemma4_text",
        EXPERTS
        | {
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.sliding_window": "sliding_window",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_used_count": "top_k_experts",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        (
            (r"^per_layer_model_proj\.", "model.per_layer_model_projection."),
            (r"^per_layer_proj_norm\.", "model.per_layer_projection_norm."),
            (r"^per_layer_token_embd\.", "model.embed_tokens_per_layer."),
            (r"^rope_freqs\.weight", "model.rotary_emb.inv_freq"),
            (r"\.ffn_down_exps\.scale", ".router.per_expert_scale"),
            (r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
            (r"\.inp_gate\.", ".per_layer_input_gate."),
            (r"\.layer_output_scale\.weight", ".layer_scalar"),
            (r"\.post_ffw_norm(\w*)\.", r".post_feedforward_layernorm\1."),
            (r"\.post_norm\.", ".post_per_layer_input_norm."),
            (r"\.pre_ffw_norm_2\.", ".pre_feedforward_layernorm_2."),
            (r"\.proj\.", ".per_layer_projection."),
            (r"\.ffn_gate_inp\.scale", ".router.scale"),
            (r"\.ffn_gate_inp\.", ".router.proj."),
        ),
        fixed={"enable_moe_block": True},
        counted=_by_kind,
        required=(
            "attention.head_count_kv",
            "attention.key_length_swa",
            "attention.sliding_window_pattern",
            "rope.freq_base",
            "rope.freq_base_swa",
            "rope_freqs",
        ),
        experts="experts",
    ),
}

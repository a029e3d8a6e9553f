"""Architectures of Qwen2, Qwen3, Qwen3-Next, Qwen3.5 and Qwen4-Exp."""

from runtime.model.gguf.layout import (
    EXPERTS,
    Architecture,
    Entries,
    Rule,
    Tensors,
    from_zero,
    num_layers,
    shared,
)


def _hybrid(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the size of linear attention's values, and the types of layers if they are listed."""
    fields = {"linear_value_head_dim": own["ssm.inner_size"] // own["ssm.time_step_rank"]}
    if (listed := own.get("attention.recurrent_layers")) is None:
        return fields
    return fields | {
        "layer_types": [
            "linear_attention" if is_linear else "full_attention"
            for is_linear in listed[: num_layers(own)]
        ]
    }


def _with_ngrams(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return also the sizes of the table of n-grams, if there is one: all of its rows, and those of
    its first head, from which transformers counts the others' before the file's replace them."""
    fields = _hybrid(own, tensors) | {
        "indexer_compress_ratio": max(own["attention.compress_ratios"]),
        "ple_layer_ids": [layer + 1 for layer in own.get("ple.layers", ())],
    }
    if not fields["ple_layer_ids"]:
        return fields
    num_rows, width = tensors["per_layer_token_embd.weight"].shape
    heads = own["ple.head_vocab_sizes"]
    return fields | {
        "make_ngram_vocab_size_divisible_by": num_rows,
        "ngram_vocab_size_base": heads[0],
        "ple_embed_dim": len(heads) * width,
    }


_SHARED = EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_SHARED_NAMES = shared("shared_expert")
_SHARED_GATE = Rule(
    (r"\.ffn_gate_inp_shexp\.weight",), ".mlp.shared_expert_gate.weight", ("as_row",)
)
_HYBRID = _SHARED | {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_NEEDED = ("full_attention_interval", "ssm.inner_size", "ssm.time_step_rank")
_QWEN3 = Architecture("qwen3_moe", EXPERTS, fixed={"norm_topk_prob": True})

ARCHITECTURES = {
    "qwen2moe": Architecture("qwen2_moe", _SHARED, _SHARED_NAMES, (_SHARED_GATE,)),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _HYBRID,
        counted=_hybrid,
        required=_NEEDED,
        is_partly_turned=True,
        rules_of="qwen35moe",
    ),
    "qwen3moe": _QWEN3,
    "qwen3next": Architecture(
        "qwen3_next",
        _HYBRID,
        (
            (r"\.ssm_ba\.", ".linear_attn.in_proj_ba."),
            (r"\.ssm_dt\.bias", ".linear_attn.dt_bias"),
            (r"\.ssm_in\.", ".linear_attn.in_proj_qkvz."),  # of older files
            (r"\.ssm_norm\.", ".linear_attn.norm."),
            (r"\.ssm_out\.", ".linear_attn.out_proj."),
            *_SHARED_NAMES,
        ),
        (
            Rule((r"\.ssm_a",), ".linear_attn.A_log", ("log_negate", "cast")),
            Rule((r"\.ssm_conv1d\.weight",), ".linear_attn.conv1d.weight", ("unsqueeze",)),
            Rule(
                (r"\.attn_qkv\.weight", r"\.attn_gate\.weight"),
                ".linear_attn.in_proj_qkvz.weight",
                ("group_by_heads",),
            ),
            _SHARED_GATE,
            *from_zero("layernorm", "model.norm", "self_attn.q_norm", "self_attn.k_norm"),
        ),
        counted=_hybrid,
        required=_NEEDED,
        is_partly_turned=True,
    ),
    "qwen4exp": Architecture(
        "qwen4_exp_text",
        _HYBRID
        | {
            "attention.indexer.head_count": "indexer_n_heads",
            "attention.indexer.key_length": "indexer_head_dim",
            "attention.indexer.top_k": "indexer_budget",
            "hyper_connection.count": "hc_count",
            "hyper_connection.low_rank": "hc_lowrank",
            "ple.conv_kernel": "ple_conv_kernel_size",
            "ple.eos_token_id": "eos_token_id",
            "ple.heads_per_ngram": "heads_per_ngram",
            "ple.ngram_size": "ngram_size",
        },
        (
            (r"^per_layer_token_embd\.", "{ngrams}.ngram_embedding."),
            (r"^qwen4exp\.ple\.layer_multipliers", "{ngrams}.layer_multipliers"),
            (r"^qwen4exp\.ple\.head_offsets", "{ngrams}.ngram_heads_offsets"),
            (r"^qwen4exp\.ple\.head_vocab_sizes", "{ngrams}.ngram_heads_vocab_sizes"),
            (r"^output_hc_(\w+)\.", r"model.hyper_connection_mixer.\1."),
            (r"\.hc_attn_(\w+)\.", r".attn_hyper_connection.\1."),
            (r"\.hc_ffn_(\w+)\.", r".mlp_hyper_connection.\1."),
            (r"hyper_connection(\w*\.)norm\.", r"hyper_connection\1hc_norm."),
            (r"hyper_connection(\w*\.)(?=(?:down|up)\.)", r"hyper_connection\1input_mix_weight_"),
            (r"hyper_connection\.inject\.", "hyper_connection.block_inject_weight."),
            (r"\.indexer\.([qk])_norm\.", r".self_attn.indexer.\1_layernorm."),
            (r"\.ple_(key|value)\.", r".ple.\1_proj."),
            (r"\.ple_norm_(\w+)\.", r".ple.norm_\1."),
        ),
        (
            Rule((r"\.ple_conv1d\.weight",), ".ple.conv1d.weight", ("unsqueeze",)),
            Rule(
                (r"\.indexer\.q_proj\.weight", r"\.indexer\.k_proj\.weight"),
                ".self_attn.indexer.index_qk_proj.weight",
                ("concatenate",),
            ),
            *from_zero("hc_norm", "norm_conv", "norm_key", "norm_query"),
            *from_zero("q_layernorm", "k_layernorm"),
        ),
        fixed={"indexer_kv_heads": 1, "output_gate_type": "sigmoid"},
        counted=_with_ngrams,
        required=(*_NEEDED, "attention.compress_ratios"),
        is_partly_turned=True,
        rules_of="qwen35moe",
    ),
    "qwen3vlmoe": _QWEN3,  # its language model; a text's three positions are one
}

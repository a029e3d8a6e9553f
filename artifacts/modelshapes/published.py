"""Configs of models that were published since 2025, as far as sizes follow from them: fields of
transformers by the names that `moectl plan` knows.

Where a checkpoint's config is another program's, its fields are translated: DeepSeek-V4.1's n-gram
tables into those of Qwen4-Exp.
"""

from collections.abc import Mapping

_EVERY_FOURTH = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_DELTA_RULE = _EVERY_FOURTH | {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "num_key_value_heads": 2,
}
_QWEN3_NEXT = _DELTA_RULE | {
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "shared_expert_intermediate_size": 512,
}
_GLM_5 = {
    "first_k_dense_replace": 3,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
_DEEPSEEK_V4 = {
    "expert_dtype": "fp4",
    "hc_mult": 4,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "vocab_size": 129280,
}

CONFIGS: Mapping[str, Mapping] = {
    "qwen3-next-80b-a3b": _QWEN3_NEXT
    | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
    },
    "qwen3.6-35b-a3b": _QWEN3_NEXT
    | {
        "mtp_num_hidden_layers": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "vocab_size": 248320,
    },
    "qwen3.8-flash-next": _DELTA_RULE
    | {
        "hc_count": 4,
        "hc_lowrank": 320,
        "hidden_size": 2560,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "linear_num_value_heads": 48,
        "moe_intermediate_size": 640,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "ple_embed_dim": 2560,
        "ple_layer_ids": [2],
        "shared_expert_intermediate_size": 640,
        "vocab_size": 248320,
    },
    "deepseek-v4-flash": _DEEPSEEK_V4
    | {
        "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_hidden_layers": 43,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1024,
    },
    "deepseek-v4.1-flash": _DEEPSEEK_V4
    | {
        "compress_ratios": [4] * 40,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "ngram_vocab_size_base": 24_000_000,
        "num_hidden_layers": 40,
        "ple_embed_dim": 4096,
        "ple_layer_ids": [2, 15],
        "q_lora_rank": 1280,
    },
    "glm-5.2": _GLM_5
    | {
        "hidden_size": 6144,
        "n_routed_experts": 256,
        "num_hidden_layers": 78,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
    },
    "glm-5.3-flash": _GLM_5
    | _EVERY_FOURTH
    | {
        "hc_mult": 4,
        "hidden_size": 4096,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "n_routed_experts": 288,
        "num_hidden_layers": 45,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
    },
    "gemma-4-26b-a4b": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "vocab_size": 262144,
    },
    "minimax-m3": {
        "dense_intermediate_size": 12288,
        "first_k_dense_replace": 3,
        "head_dim": 128,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "shared_intermediate_size": 3072,
        "vocab_size": 200064,
    },
    "kimi-k3": {
        "expert_dtype": "fp4",
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
        },
        "moe_intermediate_size": 3072,
        "n_shared_experts": 2,
        "num_attention_heads": 96,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_expert_hidden_size": 3584,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}
"""By name."""

"""Fields of config.json that change a forward pass, varied: sets of fields for each family of
`families.FAMILIES`.

Each set changes a small model in many ways at once. Together the sets of a family change every
field that its own code reads, which `tests/runtime/model/test_config_fields.py` checks.
"""

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.5, 1.6, 1.7, 1.8],
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}

_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "pad_token_id": 5,
}
_NUMBERS = {"rms_norm_eps": 0.03, "num_experts_per_tok": 1, "initializer_range": 0.3}
_GELU = {"hidden_act": "gelu"}
_IN_TRAINING = {"attention_dropout": 0.5, "output_router_logits": True, "router_aux_loss_coef": 0.5}

VARIED: dict[str, tuple[dict[str, object], ...]] = {
    "mixtral": (
        _SIZES
        | {"num_local_experts": 5, "head_dim": 12, "sliding_window": 5, "rope_parameters": _YARN},
        _NUMBERS | _GELU | _IN_TRAINING | {"router_jitter_noise": 0.5, "rope_parameters": _LINEAR},
    ),
    "olmoe": (
        _SIZES
        | {
            "num_experts": 6,
            "norm_topk_prob": True,
            "rope_parameters": _DYNAMIC,
            "sliding_window": 5,
        }
        | {"head_dim": 8},
        _NUMBERS
        | _GELU
        | _IN_TRAINING
        | {"clip_qkv": 0.3, "attention_bias": True, "rope_parameters": _LINEAR},
    ),
    "qwen2_moe": (
        _SIZES
        | {
            "num_experts": 6,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
            "mlp_only_layers": [2],
        }
        | {
            "norm_topk_prob": True,
            "rope_parameters": _YARN,
            "tie_word_embeddings": False,
            "head_dim": 12,
        },
        _NUMBERS
        | _GELU
        | _IN_TRAINING
        | {
            "qkv_bias": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "rope_parameters": _LLAMA3,
        }
        | {
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": 5,
            "intermediate_size": 20,
        }
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phimoe": (
        _SIZES
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": _LONG,
        }
        | {"attention_bias": False, "lm_head_bias": False},
        _NUMBERS
        | _GELU
        | _IN_TRAINING
        | {
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "input_jitter_noise": 0.3,
            "tie_word_embeddings": True,
        }
        | {"original_max_position_embeddings": 16, "head_dim": 12},
    ),
    "deepseek_v2": (
        _SIZES
        | {
            "num_key_value_heads": 6,
            "first_k_dense_replace": 2,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
        }
        | {
            "moe_intermediate_size": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
        }
        | {
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 6,
            "topk_method": "group_limited_greedy",
        }
        | {"n_group": 3, "topk_group": 2},
        _NUMBERS
        | _GELU
        | {
            "attention_dropout": 0.5,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        }
        | {"first_k_dense_replace": 0, "rope_parameters": _LINEAR, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        _SIZES
        | {
            "num_experts": 16,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0, 3],
            "norm_topk_prob": True,
        }
        | {"rope_parameters": _YARN, "head_dim": 12, "tie_word_embeddings": True},
        _NUMBERS
        | _GELU
        | _IN_TRAINING
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "attention_bias": True,
        }
        | {"use_sliding_window": True, "sliding_window": 5, "rope_parameters": _LLAMA3},
    ),
    "gpt_oss": (
        _SIZES
        | {"num_local_experts": 5, "head_dim": 12, "sliding_window": 5, "rope_parameters": _LINEAR}
        | {"swiglu_alpha": 1.1, "swiglu_limit": 0.3, "attention_bias": False},
        _NUMBERS
        | _IN_TRAINING
        | {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True},
    ),
}

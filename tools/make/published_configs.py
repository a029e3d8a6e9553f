"""The config.json of checkpoints that are published in few bits, by the size that is written in
full size."""

from collections.abc import Callable, Mapping


def gpt_oss_20b(changes: Mapping[str, int]) -> dict:
    """openai/gpt-oss-20b: 24 layers of 32 experts in MXFP4."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    config = _changed(config, changes)
    kinds = ("sliding_attention", "full_attention")
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    return config | {
        "layer_types": [kinds[layer % 2] for layer in range(config["num_hidden_layers"])],
        "quantization_config": {"modules_to_not_convert": plain, "quant_method": "mxfp4"},
    }


def qwen3_30b_a3b_fp8(changes: Mapping[str, int]) -> dict:
    """Qwen/Qwen3-30B-A3B-FP8: 48 layers of 128 experts in FP8 with scales for 128 x 128 weights."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = _changed(config, changes)
    parts = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    plain = [
        f"model.layers.{layer}.{part}"
        for layer in range(config["num_hidden_layers"])
        for part in parts
    ]
    return config | {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", *plain],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    }


CONFIGS: dict[str, Callable[[Mapping[str, int]], dict]] = {
    "gpt-oss-20b": gpt_oss_20b,
    "qwen3-30b-a3b-fp8": qwen3_30b_a3b_fp8,
}


def _changed(config: dict, changes: Mapping[str, int]) -> dict:
    """The config with other sizes; special tokens stay within the vocabulary."""
    unknown = set(changes) - set(config)
    assert not unknown, f"{unknown} is not in the config"
    config = config | changes
    special = {name: value for name, value in config.items() if name.endswith("token_id")}
    return config | {name: min(value, config["vocab_size"] - 1) for name, value in special.items()}

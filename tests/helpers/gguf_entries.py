"""The entries of the small GGUF files of tests, as llama.cpp's convert_hf_to_gguf.py writes
them."""

from collections.abc import Mapping

import gguf
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS = ["<pad>", "<bos>", "<eos>", *bytes_to_unicode().values(), "th"]


def describe_model(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Write the entries of a model and its tokenizer."""
    config = model.config.get_text_config()
    num_further = getattr(config, "num_nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + num_further)
    if num_further:
        writer.add_nextn_predict_layers(num_further)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if not hasattr(config, "kv_lora_rank") and config.model_type != "lfm2_moe":
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        scale_positions(writer, config.rope_parameters)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    writer.add_expert_used_count(getattr(config, "num_experts_per_tok", None) or config.moe_topk)
    _describe_experts(writer, config)
    if config.model_type == "lfm2_moe":
        heads = [
            config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types
        ]
        writer.add_head_count_kv(heads)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if hasattr(config, "linear_num_key_heads"):
        _describe_linear(writer, config)
    if hasattr(config, "kv_lora_rank"):
        _describe_latent(writer, config)
    elif hasattr(config, "attention_multiplier"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    elif config.model_type not in ("qwen2_moe", "olmoe"):
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(
            int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
        )
    _describe_tokenizer(writer)


def _describe_linear(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """As Qwen3NextModel and those after it do."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_sections([3, 3, 2, 0])


def _describe_latent(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """As DeepseekV2Model does, with sizes of keys and values that are those of what is cached."""
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)


def scale_positions(writer: gguf.GGUFWriter, scaling: Mapping[str, object]) -> None:
    """Say that positions are scaled by YaRN."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _describe_experts(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    if config.model_type in (
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "olmoe",
        "lfm2_moe",
    ):
        writer.add_expert_count(config.num_experts)
    elif config.model_type in (
        "mixtral",
        "minimax_m2",
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
    ):
        writer.add_expert_count(config.num_local_experts)
        if width := getattr(config, "shared_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(width)
    elif config.model_type == "hunyuan_v1_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    elif config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        width = config.moe_num_shared_experts * config.moe_intermediate_size
        writer.add_expert_shared_feed_forward_length(width)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
    else:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.model_type in ("minimax_m2", "gpt_oss", "hunyuan_v1_moe"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    elif hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type in ("deepseek_v3", "dots1", "glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _describe_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

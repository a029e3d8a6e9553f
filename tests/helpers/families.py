"""Small random models of every supported family, and checkpoints of them in both layouts in use.

`FAMILIES[name](fields)` gives `(config, model)`, seeded and in float32, with these config fields in
place of its own; `save(name, layout, path)` writes a checkpoint with a tokenizer whose tokens are
single characters. DeepSeek-V2 begins with a dense layer and Qwen3-MoE has one in the middle: MoE
layers are not all layers. Qwen2-MoE ties its embeddings. No expert weight is square and none is
constant, so that a transposed or skipped one is noticed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

LAYOUTS = (
    "hub",
    "fused",
)  # one tensor per expert and projection, as published; whole [E, ...] parameters
VOCABULARY = 96

Family = Callable[..., tuple[PreTrainedConfig, PreTrainedModel]]


def save(
    family: str,
    layout: str,
    path: Path,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "50GB",
    fields: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint of `family` to `path` and return it; a small `shard_size`, say `40KB`,
    splits it in shards. `fields` replace some of its config."""
    assert layout in LAYOUTS, layout
    model = FAMILIES[family](fields or {})[1].to(dtype)
    model.config.dtype = dtype
    logging.disable_progress_bar()
    model.save_pretrained(path, save_original_format=layout == "hub", max_shard_size=shard_size)
    character_tokenizer().save_pretrained(path)
    return path


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Newline and the printable ASCII characters but three, after the special tokens of `COMMON`;
    others are lost."""
    characters = ["\n", *(chr(code) for code in range(32, 127) if chr(code) not in "`|~")]
    texts = ["<pad>", "<bos>", "<eos>", *characters]
    assert len(texts) == VOCABULARY, len(texts)
    tokenizer = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[])
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _family(prefix: str, **own: object) -> Family:
    """A maker of models of the classes `<prefix>Config` and `<prefix>ForCausalLM`."""

    def make(
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[PreTrainedConfig, PreTrainedModel]:
        config = getattr(transformers, f"{prefix}Config")(**COMMON | own | fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
            _roughen(model)
            return config, model

    return make


def _roughen(model: PreTrainedModel) -> None:
    """Give biases and norms, which are born as zeros and ones, values of their own."""
    for parameter in model.parameters():
        if parameter.data.unique().numel() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide, or the experts of so narrow a model hardly move its logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MULTI_HEAD_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, Family] = {
    "mixtral": _family("Mixtral", num_local_experts=4),
    "olmoe": _family("Olmoe", num_experts=8),
    "qwen2_moe": _family(
        "Qwen2Moe",
        num_experts=8,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        tie_word_embeddings=True,
    ),
    "phimoe": _family("Phimoe", num_local_experts=4, lm_head_bias=True, attention_bias=True),
    "deepseek_v2": _family(
        "DeepseekV2",
        num_hidden_layers=3,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        moe_intermediate_size=24,
        intermediate_size=56,
        **MULTI_HEAD_LATENT,
    ),
    "qwen3_moe": _family(
        "Qwen3Moe",
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=8,
        moe_intermediate_size=24,
        head_dim=8,
    ),
    "gpt_oss": _family("GptOss", num_local_experts=4, head_dim=8, max_position_embeddings=131072),
}

"""What a GGUF file says of its model, in the terms of transformers: config, names of weights, tokenizer."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_conversion_mapping import DENSE_DECODER_RENAMINGS, Unsqueeze

from artifacts.errors import BadInput
from runtime.model.gguf_file import open_parts

FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""The families of transformers by the architecture that a file names."""

# Entries of experts, which transformers' table lacks.
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NAMES = (
    (r"^output_norm\.", "model.norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn_q_norm\.", ".self_attn.q_norm."),
    (r"\.attn_k_norm\.", ".self_attn.k_norm."),
    (r"\.ffn_gate_inp\.", ".mlp.gate."),
    (r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."),
    (r"\.ffn_gate_shexp\.", ".mlp.shared_expert.gate_proj."),
    (r"\.ffn_up_shexp\.", ".mlp.shared_expert.up_proj."),
    (r"\.ffn_down_shexp\.", ".mlp.shared_expert.down_proj."),
    (r"\.ffn_down_exps\.weight", ".mlp.experts.down_proj"),
    (r"\.ffn_gate_up_exps\.weight", ".mlp.experts.gate_up_proj"),
)


def gguf_config(path: Path) -> dict:
    """Return the config of transformers that a GGUF file describes, as a dict with its `model_type`.

    Raises BadInput for an architecture that is not read, and for positions that are scaled.
    """
    shards = open_parts(path)
    names = {name for shard in shards for name in shard.tensors}
    metadata = shards[0].entries
    architecture = str(metadata.get("general.architecture"))
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BadInput(f"{path} is a GGUF file of {architecture[:40]}: moectl reads {known}")
    if "token_embd.weight" not in names:
        raise BadInput(f"{path} has no token_embd.weight: it is a vocabulary or a part of a model, take the whole")
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise BadInput(f"{path} scales its positions (rope.scaling), which moectl does not read in GGUF files")
    family = FAMILIES[architecture]
    config = {"model_type": family, **GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {})}
    config |= _renamed(metadata, f"{architecture}.", GGUF_CONFIG_MAPPING[family] | _WIDTHS)
    config |= _renamed(metadata, "tokenizer.", GGUF_CONFIG_MAPPING["tokenizer"])
    config.setdefault("vocab_size", metadata.get("tokenizer.ggml.tokens"))
    return config | {"tie_word_embeddings": "output.weight" not in names}


def _renamed(metadata: Mapping[str, object], prefix: str, names: Mapping[str, str | None]) -> dict[str, object]:
    """The entries that begin with `prefix` and have a name in transformers, by that."""
    given = ((new, metadata.get(prefix + old)) for old, new in names.items() if new)
    return {new: value for new, value in given if value is not None}


def gguf_mapping() -> list[WeightTransform]:
    """The way from the names in GGUF files to the parameters of a model: new rules, as matching changes them."""
    renamings = [WeightRenaming(*pair) for pair in _NAMES]
    gate_up = WeightConverter(
        source_patterns=[r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
        target_patterns=".mlp.experts.gate_up_proj",
        operations=[Concatenate(dim=1)],
    )
    name = "mlp.shared_expert_gate.weight"  # a row in the files
    shared_gate = WeightConverter(name, name, operations=[Unsqueeze(0, expected_ndim=2)])
    return [*deepcopy(DENSE_DECODER_RENAMINGS), *renamings, gate_up, shared_gate]


def has_tokenizer(path: Path) -> bool:
    """Whether a GGUF file holds a vocabulary."""
    return "tokenizer.ggml.model" in open_parts(path)[0].entries


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer that a GGUF file holds, of several the first. Raises what transformers raises."""
    first = open_parts(path)[0].path
    return PreTrainedTokenizerFast.from_pretrained(first.parent, gguf_file=first.name)

"""What a GGUF file says of its model, in the terms of transformers: config, names of weights, tokenizer."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_conversion_mapping import DENSE_DECODER_RENAMINGS, PermuteRows, Unsqueeze

from artifacts.errors import BadInput
from runtime.model.gguf_architectures import Architecture, architecture_of, check_computed, head_dim
from runtime.model.gguf_file import open_parts


def gguf_config(path: Path) -> dict:
    """Return the config of transformers that a GGUF file describes, as a dict with its `model_type`.

    Raises BadInput for an architecture that is not read, and for what the family does not compute.
    """
    shards = open_parts(path)
    names = {name for shard in shards for name in shard.tensors}
    metadata = shards[0].entries
    form, own = architecture_of(path, metadata)
    if "token_embd.weight" not in names:
        raise BadInput(f"{path} has no token_embd.weight: it is a vocabulary or a part of a model, take the whole")
    check_computed(path, form, own)
    config = {"model_type": form.family, **form.fixed, **_renamed(own, form.fields)}
    config |= _renamed(metadata, {f"tokenizer.{old}": new for old, new in GGUF_CONFIG_MAPPING["tokenizer"].items()})
    config.setdefault("vocab_size", metadata.get("tokenizer.ggml.tokens"))
    return config | _counted(form, own, names) | {"tie_word_embeddings": "output.weight" not in names}


def _counted(form: Architecture, own: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Fields that are made of several entries, or of which tensors there are."""
    fields: dict[str, object] = {}
    if form.is_partly_turned:
        fields["partial_rotary_factor"] = own.get("rope.dimension_count", head_dim(own)) / head_dim(own)
    if (num_further := own.get("nextn_predict_layers")) is not None:  # which predict further tokens
        fields["num_hidden_layers"] = own["block_count"] - num_further
    if form.family == "glm4_moe":
        fields |= {"use_qk_norm": "blk.0.attn_q_norm.weight" in names, "attention_bias": "blk.0.attn_q.bias" in names}
    return fields


def _renamed(entries: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """The entries that have a name in transformers, by that."""
    return {new: entries[old] for old, new in names.items() if entries.get(old) is not None}


def gguf_mapping(path: Path, config: PreTrainedConfig) -> list[WeightTransform]:
    """The way from the names in a GGUF file to the parameters of a model: new rules, as matching changes them."""
    form, _ = architecture_of(path, open_parts(path)[0].entries)
    renamings = [WeightRenaming(*pair) for pair in form.names]
    gate_up = WeightConverter(
        source_patterns=[r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
        target_patterns=".mlp.experts.gate_up_proj",
        operations=[Concatenate(dim=1)],
    )
    name = "mlp.shared_expert_gate.weight"  # a row in the files
    shared_gate = WeightConverter(name, name, operations=[Unsqueeze(0, expected_ndim=2)])
    turned = _permuted_back(config) if form.is_permuted else []
    return [*deepcopy(DENSE_DECODER_RENAMINGS), *renamings, gate_up, shared_gate, *turned]


def _permuted_back(config: PreTrainedConfig) -> list[WeightConverter]:
    """Put the rows of q and k, which llama.cpp takes by turns from both halves of a head, in transformers' order."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {f"self_attn.{part}.weight": PermuteRows(_halves(config.head_dim, count)) for part, count in heads.items()}
    return [WeightConverter(name, name, operations=[permute]) for name, permute in names.items()]


def _halves(head_dim: int, num_heads: int) -> torch.Tensor:
    rows = torch.arange(num_heads * head_dim, device="cpu")  # named, as a model may be built on another
    return rows.view(num_heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)


def has_tokenizer(path: Path) -> bool:
    """Whether a GGUF file holds a vocabulary."""
    return "tokenizer.ggml.model" in open_parts(path)[0].entries


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer that a GGUF file holds, of several the first. Raises what transformers raises."""
    first = open_parts(path)[0].path
    return PreTrainedTokenizerFast.from_pretrained(first.parent, gguf_file=first.name)

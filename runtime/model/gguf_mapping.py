"""The way from the names in a GGUF file to the parameters of transformers' model."""

from copy import deepcopy
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.core_model_loading import Concatenate, Interleave, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.gguf.gguf_conversion_mapping import DENSE_DECODER_RENAMINGS, PermuteRows, Unsqueeze

from artifacts.formats.gguf_header import read_header
from runtime.model.gguf_architectures import architecture_of
from runtime.model.locate import parts_of

_ROWS = ("mlp.shared_expert_gate.weight", "mlp.gate.moe_statics.e_score_correction_bias")  # of which files have one


def gguf_mapping(path: Path, config: PreTrainedConfig) -> list[WeightTransform]:
    """The rules for the tensors of a file: new ones, as matching changes them."""
    form, _ = architecture_of(path, read_header(parts_of(path)[0]).entries)
    renamings = [WeightRenaming(*pair) for pair in form.names]
    by_turns = [Interleave(dim=1, inverse=True)] if form.takes_turns else []
    gate_up = [
        WeightConverter(
            source_patterns=[rf"\.ffn_{part}_exps\.{kind}" for part in ("gate", "up")],
            target_patterns=f".mlp.experts.gate_up_proj{ending}",
            operations=[Concatenate(dim=1), *by_turns],
        )
        for kind, ending in (("weight", ""), ("bias", "_bias"))
    ]
    rows = [WeightConverter(name, name, operations=[Unsqueeze(0, expected_ndim=2)]) for name in _ROWS]
    turned = _permuted_back(config) if form.is_permuted else []
    return [*deepcopy(DENSE_DECODER_RENAMINGS), *renamings, *gate_up, *rows, *turned]


def _permuted_back(config: PreTrainedConfig) -> list[WeightConverter]:
    """Put the rows of q and k, which llama.cpp takes by turns from both halves of a head, in transformers' order."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {f"self_attn.{part}.weight": PermuteRows(_halves(config.head_dim, count)) for part, count in heads.items()}
    return [WeightConverter(name, name, operations=[permute]) for name, permute in names.items()]


def _halves(head_dim: int, num_heads: int) -> torch.Tensor:
    rows = torch.arange(num_heads * head_dim, device="cpu")  # named, as a model may be built on another
    return rows.view(num_heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)

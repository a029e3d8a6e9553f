"""Rules from the names in a GGUF file to the parameters of transformers' model."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.integrations.gguf.gguf_conversion_mapping import (
    DENSE_DECODER_RENAMINGS,
    GGUF_ARCHS,
    Cast,
    LogNegate,
    PermuteRows,
    SubtractOne,
    Unsqueeze,
)

from artifacts.formats.gguf.gguf_header import read_header
from runtime.model.files.locate import parts_of
from runtime.model.gguf.architectures import architecture_of


class _Joining(ConversionOps):
    """Makes one parameter of its tensors."""

    @torch.no_grad
    def convert(
        self,
        input_dict: dict[str, torch.Tensor],
        source_patterns: list[str],
        target_patterns: list[str],
        config: PreTrainedConfig | None = None,
        **_: object,
    ) -> dict[str, torch.Tensor]:
        found = (input_dict[pattern] for pattern in source_patterns)
        tensors = (each[0] if isinstance(each, list) else each for each in found)
        return {target_patterns[0]: self.joined(config, *tensors)}


class JoinHeads(_Joining):
    """Joins k_b [heads, latent, k] and v_b [heads, v, latent] into one matrix [heads * (k + v),
    latent]. llama.cpp multiplies a query by k_b, and stores it transposed for that."""

    @staticmethod
    def joined(_: PreTrainedConfig, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


class GroupByHeads(_Joining):
    """Joins the rows of queries, keys and values, and those of gates, into one matrix that has the
    four of each key head of linear attention together, as Qwen3-Next has them."""

    @staticmethod
    def joined(config: PreTrainedConfig, qkv: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        heads = config.linear_num_key_heads
        size = heads * config.linear_key_head_dim
        parts = (*qkv.split((size, size, len(gates))), gates)
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


class Reshape(ConversionOps):
    """Gives tensors a shape: files have more or fewer dimensions of 1 than a model."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    @torch.no_grad
    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: object,
    ) -> dict[str, torch.Tensor]:
        alone = {
            name: each[0] if isinstance(each, list) else each for name, each in input_dict.items()
        }
        names = target_patterns if len(alone) == 1 else alone  # several go on to be joined
        tensors = (tensor.reshape(self.shape) for tensor in alone.values())
        return dict(zip(names, tensors, strict=True))


OPERATIONS: Mapping[str, Callable[[PreTrainedModel], ConversionOps]] = {
    "cast": lambda model: Cast(model.dtype),
    "concatenate": lambda model: Concatenate(dim=0),
    "by_channel": lambda model: Reshape(
        -1, 1, model.config.get_text_config().linear_conv_kernel_dim
    ),
    "by_head": lambda model: Reshape(1, 1, -1, 1),
    "flatten": lambda model: Reshape(-1),
    "group_by_heads": lambda model: GroupByHeads(),
    "join_heads": lambda model: JoinHeads(),
    "log_negate": lambda model: LogNegate(),
    "subtract_one": lambda model: SubtractOne(),
    "unsqueeze": lambda model: Unsqueeze(1),
}
"""Operations of the rules of architectures, by name."""

_ROWS = (
    "mlp.shared_expert_gate.weight",
    "mlp.gate.moe_statics.e_score_correction_bias",
)  # of which files have one


def gguf_mapping(path: Path, model: PreTrainedModel) -> list[WeightTransform]:
    """Return the rules for the tensors of a file; they are new each time, as matching changes them.
    A rule that computes ends in a `Cast`, and needs its tensor in float32."""
    entries = read_header(parts_of(path)[0]).entries
    form, _ = architecture_of(path, entries)
    computed = [
        WeightConverter(
            source_patterns=list(rule.sources),
            target_patterns=rule.target,
            operations=[OPERATIONS[name](model) for name in rule.operations],
        )
        for rule in form.rules
    ]
    if form.rules_of:
        own_names = [WeightRenaming(*pair) for pair in form.own_names]
        return [*_of_transformers(form.rules_of, model), *own_names, *computed]
    renamings = [WeightRenaming(*pair) for pair in form.names]
    by_turns = [Interleave(dim=1, inverse=True)] if form.takes_turns else []
    gate_up = [
        WeightConverter(
            source_patterns=[rf"\.ffn_{part}_exps\.{kind}" for part in ("gate", "up")],
            target_patterns=f".{form.experts}.gate_up_proj{ending}",
            operations=[Concatenate(dim=1), *by_turns],
        )
        for kind, ending in (("weight", ""), ("bias", "_bias"))
        if form.is_gated
    ]
    rows = [
        WeightConverter(name, name, operations=[Unsqueeze(0, expected_ndim=2)]) for name in _ROWS
    ]
    turned = _permuted_back(model.config) if form.is_permuted else []
    joined = [_shared_gate_up(form.shared_gate_up)] if form.shared_gate_up else []
    convolution = WeightConverter(
        r"\.shortconv\.conv\.weight", ".conv.conv.weight", operations=[Unsqueeze(1)]
    )
    own = dict(form.own_names)
    dense = [
        rule
        for rule in deepcopy(DENSE_DECODER_RENAMINGS)
        if own.keys().isdisjoint(rule.source_patterns)
    ]
    return [*dense, *renamings, *computed, convolution, *gate_up, *rows, *turned, *joined]


def _of_transformers(name: str, model: PreTrainedModel) -> list[WeightTransform]:
    rules = GGUF_ARCHS[name](model.config)
    for rule in rules:
        if isinstance(rule, WeightConverter) and isinstance(
            rule.operations[0], LogNegate | SubtractOne
        ):
            rule.operations.append(Cast(model.dtype))
    return [
        *deepcopy(rules),
        WeightRenaming(r"\.ffn_gate_up_exps\.weight", ".mlp.experts.gate_up_proj"),
    ]


def _shared_gate_up(target: str) -> WeightConverter:
    sources = [rf"\.ffn_{part}_shexp\.weight" for part in ("gate", "up")]
    return WeightConverter(
        source_patterns=sources, target_patterns=target, operations=[Concatenate(dim=0)]
    )


def _permuted_back(config: PreTrainedConfig) -> list[WeightConverter]:
    """Put the rows of q and k, which llama.cpp takes by turns from both halves of a head, in
    transformers' order."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {
        f"self_attn.{part}.weight": PermuteRows(_halves(size, count))
        for part, count in heads.items()
    }
    return [WeightConverter(name, name, operations=[permute]) for name, permute in names.items()]


def _halves(head_dim: int, num_heads: int) -> torch.Tensor:
    # named, as a model may be built on another
    rows = torch.arange(num_heads * head_dim, device="cpu")
    return rows.view(num_heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)

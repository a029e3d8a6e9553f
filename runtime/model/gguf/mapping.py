"""Rules from the names in a GGUF file to the parameters of transformers' model."""

from collections.abc import Callable, Iterable, Mapping
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
from runtime.model.gguf.layout import Rule


def _alone(found: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return found[0] if isinstance(found, list) else found


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
        tensors = (_alone(input_dict[pattern]) for pattern in source_patterns)
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
    """Gives a tensor a shape: files have more or fewer dimensions of 1 than a model."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    @torch.no_grad
    def convert(
        self,
        input_dict: dict[str, torch.Tensor],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: object,
    ) -> dict[str, torch.Tensor]:
        (found,) = input_dict.values()
        return {target_patterns[0]: _alone(found).reshape(self.shape)}


def _halves_together(config: PreTrainedConfig, num_heads: int) -> PermuteRows:
    """Return the operation on the rows of q or k, which llama.cpp takes by turns from both halves
    of a head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # the device is named, as a model may be built on another
    rows = torch.arange(num_heads * size, device="cpu")
    return PermuteRows(rows.view(num_heads, size // 2, 2).transpose(1, 2).flatten())


OPERATIONS: Mapping[str, Callable[[PreTrainedModel], ConversionOps]] = {
    "as_row": lambda model: Unsqueeze(0, expected_ndim=2),  # which some files have
    "by_channel": lambda model: Reshape(
        -1, 1, model.config.get_text_config().linear_conv_kernel_dim
    ),
    "by_head": lambda model: Reshape(1, 1, -1, 1),
    "by_turns": lambda model: Interleave(dim=1, inverse=True),
    "cast": lambda model: Cast(model.dtype),
    "concatenate": lambda model: Concatenate(dim=0),
    "concatenate_each": lambda model: Concatenate(dim=1),  # those of each expert
    "flatten": lambda model: Reshape(-1),
    "group_by_heads": lambda model: GroupByHeads(),
    "join_heads": lambda model: JoinHeads(),
    "log_negate": lambda model: LogNegate(),
    "permute_keys": lambda model: _halves_together(model.config, model.config.num_key_value_heads),
    "permute_queries": lambda model: _halves_together(
        model.config, model.config.num_attention_heads
    ),
    "subtract_one": lambda model: SubtractOne(),
    "unsqueeze": lambda model: Unsqueeze(1),
}
"""Operations of the rules of architectures, by name."""


def gguf_mapping(path: Path, model: PreTrainedModel) -> list[WeightTransform]:
    """Return the rules for the tensors of a file; they are new each time, as matching changes them.
    A rule that computes ends in a `Cast`, and needs its tensor in float32."""
    entries = read_header(parts_of(path)[0]).entries
    form, _ = architecture_of(path, entries)
    if form.rules_of:
        shared = _of_transformers(form.rules_of, model)
        return [*shared, *_renamings(form.own_names), *_converters(form.own_rules, model)]
    own = dict(form.own_names)
    dense = [
        rule
        for rule in deepcopy(DENSE_DECODER_RENAMINGS)
        if own.keys().isdisjoint(rule.source_patterns)
    ]
    return [*dense, *_renamings(form.names), *_converters(form.rules, model)]


def _renamings(names: Iterable[tuple[str, str]]) -> list[WeightRenaming]:
    return [WeightRenaming(*pair) for pair in names]


def _converters(rules: Iterable[Rule], model: PreTrainedModel) -> list[WeightConverter]:
    return [
        WeightConverter(
            source_patterns=list(rule.sources),
            target_patterns=rule.target,
            operations=[OPERATIONS[name](model) for name in rule.operations],
        )
        for rule in rules
    ]


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

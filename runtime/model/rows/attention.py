"""Attention of many requests in one pass: their tokens lie one after the other, [1, T], and each
request attends to its own.

transformers lets an attention function be registered by name, hands it the further arguments of a
model's forward, and makes no mask for a name that has none. The model's own function (sdpa or
eager) then computes each piece of the pass, so that heads, scales, sinks and windows are its own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from runtime.model.rows.indexed import NAME
from runtime.model.rows.passes import RowPass, RowWay
from runtime.model.rows.states import by_piece, stateful

_LAYERS = {
    *("full_attention", "sliding_attention"),
    *("linear_attention", "conv"),  # which keep states
    *("mlp", "moe"),  # which keep nothing
}
_BY_POSITION = {
    "default",
    "linear",
    "llama3",
    "proportional",
    "yarn",
}  # the angles of a token follow from its position alone
_OWN = ("sdpa", "eager")
_ALONE = {"jamba": "transformers' scan forgets the state where several tokens follow others"}
_INDEXED = {"qwen4_exp_text"}  # whose index asks the keys before a token alone


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    moectl_rows: RowPass,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend as AttentionInterface asks: queries [1, heads, T, D], keys and values of these tokens
    -> [1, T, heads, D]. Writes keys and values into the rows of the pass."""
    own = _own(module, moectl_rows.way.own)
    is_causal = moectl_rows.way.own != "eager"
    window = sliding_window or moectl_rows.way.windows.get(module.layer_idx)
    outputs = []
    for piece, tokens in moectl_rows.spans():
        q, k, v = (piece.by_row(each[:, :, tokens], 2) for each in (query, key, value))
        piece.block.write(module.layer_idx, piece.first, k, v, row=piece.row)
        held = piece.block.read(module.layer_idx, piece.rows, piece.end, query.device)
        mask = piece.mask(window, query, is_causal=is_causal)
        output, _ = own(module, q, *held, mask, sliding_window=sliding_window, **others)
        outputs.append(output.reshape(1, tokens.stop - tokens.start, *output.shape[2:]))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(NAME, _attend)


def _own(module: nn.Module, name: str) -> Callable:
    """Return the model's own attention function."""
    if name == "eager":  # which each modelling file has its own of
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[name]


@contextmanager
def attended(model: PreTrainedModel, way: str = NAME) -> Iterator[RowWay]:
    """Have the model attend in one of its own ways, or by `RowPass`, of which each forward is then
    given the `inputs`. Yields the previous way, which is restored at the end."""
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(way)
    try:
        with by_piece(model, before) if way == NAME else nullcontext(RowWay(before)) as row_way:
            yield row_way
    finally:
        model.set_attn_implementation(before)


def reason_not_joined(model: PreTrainedModel) -> str | None:
    """Return why requests of this model cannot share a pass; None if they can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if config.model_type in _INDEXED:
        kinds -= {"indexed_attention"}
    rope = _rope_types(getattr(config, "rope_parameters", None) or {}) - _BY_POSITION
    if not (model._supports_attention_backend or stateful(model)):
        return "the attention of its family cannot be replaced"
    if kinds:
        return f"layers of the kind {', '.join(sorted(kinds))} hold more than keys and values"
    if config.model_type in _ALONE:
        return _ALONE[config.model_type]
    if rope:
        return (
            f"rotary angles of the kind {', '.join(sorted(rope))} depend on the longest request "
            "of a pass"
        )
    if config._attn_implementation not in _OWN:
        return f"it attends by {config._attn_implementation}, not by {' or '.join(_OWN)}"
    return None


def _rope_types(parameters: dict) -> set[str]:
    """Return the kinds of rotary angles: one for all layers, or one for each kind of layer."""
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {
        each["rope_type"]
        for each in parameters.values()
        if isinstance(each, dict) and "rope_type" in each
    }

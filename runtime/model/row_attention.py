"""Attention of many requests in one pass: their tokens lie one after the other, [1, T], and each
request attends to its own.

transformers lets an attention function be registered by name, hands it the further arguments of a
model's forward, and makes no mask for a name that has none. The model's own function (sdpa or
eager) then computes each piece of the pass, so that heads, scales, sinks and windows are its own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from runtime.model.row_memory import LEAST_ROOM, MOST_ROWS, Block

NAME = "moectl_rows"
_LAYERS = {"full_attention", "sliding_attention"}
_BY_POSITION = {
    "default",
    "linear",
    "llama3",
    "yarn",
}  # the angles of a token follow from its position alone
_OWN = ("sdpa", "eager")


@dataclass(slots=True, eq=False)
class RowPiece:
    """Tokens of a pass that one product attends for: S tokens of each of the first n rows of
    `block`, from position `first` [n] on. Either n or S is 1."""

    block: Block
    num_rows: int
    num_tokens: int
    first: torch.Tensor  # [n] int64, on the host
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)  # by window

    def mask(
        self, window: int | None, like: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor | None:
        """Return the mask that is added to the scores [n, 1, S, C']; None if all positions are
        seen, or if a causal attention function masks the same."""
        if window not in self.masks:
            self.masks[window] = self._mask(window, like, is_causal=is_causal)
        return self.masks[window]

    def _mask(
        self, window: int | None, like: torch.Tensor, *, is_causal: bool
    ) -> torch.Tensor | None:
        end = self.end
        if window is None or end <= window:
            is_first = is_causal and self.num_rows == 1 and end == self.num_tokens
            if is_first or self.num_tokens == 1 and int(self.first.min()) + 1 == end:
                return None
        here = self.first[:, None] + torch.arange(self.num_tokens)  # [n, S]
        others = torch.arange(end)
        is_seen = others <= here[:, :, None]
        if window is not None:
            is_seen &= others > here[:, :, None] - window
        mask = torch.where(is_seen, 0.0, torch.finfo(like.dtype).min)
        return mask[:, None].to(like)

    @property
    def end(self) -> int:
        """Number of positions that the longest row has after this pass."""
        return int(self.first.max()) + self.num_tokens


@dataclass(slots=True, eq=False)
class RowPass:
    """One pass: its pieces, whose tokens follow each other, and the name of the model's own
    attention."""

    pieces: list[RowPiece]
    own: str


def one_token_each(num_rows: int, own: str) -> RowPass:
    """Return a pass over the first token of each of `num_rows` rows."""
    sizes = [min(MOST_ROWS, num_rows - start) for start in range(0, num_rows, MOST_ROWS)]
    first = torch.zeros(MOST_ROWS, dtype=torch.int64)
    return RowPass(
        [RowPiece(Block(LEAST_ROOM, size), size, 1, first[:size]) for size in sizes], own
    )


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
    own = _own(module, moectl_rows.own)
    is_causal = moectl_rows.own != "eager"
    begin = 0
    outputs = []
    for piece in moectl_rows.pieces:
        tokens = slice(begin, begin + piece.num_rows * piece.num_tokens)
        q, k, v = (_by_row(each[:, :, tokens], piece) for each in (query, key, value))
        piece.block.write(module.layer_idx, piece.first, k, v)
        held = piece.block.read(module.layer_idx, piece.num_rows, piece.end, query.device)
        mask = piece.mask(sliding_window or None, query, is_causal=is_causal)
        output, _ = own(module, q, *held, mask, sliding_window=sliding_window, **others)
        outputs.append(output.reshape(1, tokens.stop - begin, *output.shape[2:]))
        begin = tokens.stop
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(NAME, _attend)


def _by_row(tokens: torch.Tensor, piece: RowPiece) -> torch.Tensor:
    """Return [1, heads, n * S, D] as [n, heads, S, D]; n or S is 1."""
    return tokens if piece.num_rows == 1 else tokens.transpose(0, 2)


def _own(module: nn.Module, name: str) -> Callable:
    """Return the model's own attention function."""
    if name == "eager":  # which each modelling file has its own of
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[name]


@contextmanager
def attended(model: PreTrainedModel, way: str = NAME) -> Iterator[str]:
    """Have the model attend in one of its own ways, or by `RowPass`, which each forward is then
    given as `moectl_rows`. Yields the name of the previous way, which is restored at the end."""
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(way)
    try:
        yield before
    finally:
        model.set_attn_implementation(before)


def reason_not_joined(model: PreTrainedModel) -> str | None:
    """Return why requests of this model cannot share a pass; None if they can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    rope = _rope_types(getattr(config, "rope_parameters", None) or {}) - _BY_POSITION
    if not model._supports_attention_backend or getattr(model, "_is_stateful", False):
        return "the attention of its family cannot be replaced"
    if kinds:
        return f"layers of the kind {', '.join(sorted(kinds))} hold more than keys and values"
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

"""Attention that selects blocks of keys by an index, as Qwen4-Exp's, in a pass of many requests.

Other families with an index are left out: which of several equal keys theirs selects depends on how
a prompt is cut. Qwen4-Exp's asks the keys before a token alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache

from runtime.model.rows.passes import RowPass, RowPiece

NAME = "moectl_rows"


class PiecePast(Cache):
    """The cache of one layer in one piece: the states of its rows. MiniMax has a name of its own
    for the only state of its layers."""

    def __init__(self, index: int, layer: object) -> None:
        super().__init__(layers={index: layer})

    def get_linear_cache(self, index: int) -> torch.Tensor | None:
        """Return the state of a layer [n, heads, D, D], None before its first token."""
        return self.get_recurrent_state(index)

    def set_linear_cache(self, index: int, state: torch.Tensor) -> None:
        """Keep the state of a layer."""
        self.update_recurrent_state(state, index)
        self.layers[index].has_previous_state[0] = True


class IndexedRow:
    """The layer of the cache of one row of a piece: its keys and values, and the keys of its index,
    which lie in the block as the keys of layer -1 - `index`."""

    def __init__(self, piece: RowPiece, row: int, index: int) -> None:
        self._piece = piece
        self._row = row
        self._index = index

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [1, A, S, D]; returns those of the whole row."""
        return self._added(self._index, keys, values)

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Add keys of the index [1, S, D]; returns those of the whole row."""
        keys = keys[:, None]
        return self._added(-1 - self._index, keys, keys[..., :0])[0][:, 0]

    def _added(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._piece.first[self._row : self._row + 1]
        row = self._piece.row + self._row
        self._piece.block.write(layer, first, keys, values, row=row)
        end = int(first) + keys.shape[2]
        return self._piece.block.read(layer, slice(row, row + 1), end, keys.device)


@dataclass(frozen=True, slots=True)
class IndexedForward:
    """A forward of `module` that computes each row of a shared pass by itself, in the model's `own`
    way. `cache` is the name of the cache among its inputs; `rotary` makes the angles of all
    positions of a row, since the index turns earlier keys anew."""

    module: nn.Module
    forward: Callable[..., tuple[torch.Tensor, None]]  # before it was replaced
    cache: str
    own: str
    rotary: nn.Module

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: object, **given: object
    ) -> tuple[torch.Tensor, None]:
        rows = given.get(self.cache)
        if not isinstance(rows, RowPass):
            return self.forward(hidden_states, position_embeddings, **given)
        given.pop(NAME, None)
        self.module.config._attn_implementation = self.own
        try:
            outputs = [
                self._of_row(piece, row, hidden_states[:, tokens], given)
                for piece, row, tokens in _rows(rows)
            ]
        finally:
            self.module.config._attn_implementation = NAME
        return torch.cat(outputs, dim=1), None

    def _of_row(
        self, piece: RowPiece, row: int, hidden: torch.Tensor, given: Mapping[str, object]
    ) -> torch.Tensor:
        index = self.module.layer_idx
        begin = int(piece.first[row])
        positions = torch.arange(begin + hidden.shape[1], device=hidden.device)
        angles = self.rotary(hidden, positions.expand(3, 1, -1))
        own = {
            "attention_mask": _mask(positions, begin, hidden, self.own),
            self.cache: PiecePast(index, IndexedRow(piece, row, index)),
        }
        output, _ = self.forward(hidden, angles, **given | own)
        return output


def _rows(rows: RowPass) -> Iterator[tuple[RowPiece, int, slice]]:
    """Yield each row of each piece, and the place of its tokens in the pass."""
    for piece, tokens in rows.spans():
        for row in range(piece.num_rows):
            begin = tokens.start + row * piece.num_tokens
            yield piece, row, slice(begin, begin + piece.num_tokens)


def _mask(positions: torch.Tensor, begin: int, like: torch.Tensor, own: str) -> torch.Tensor:
    """Return the mask [1, 1, S, C] of the tokens from position `begin` on, as `own` attention has
    it: true or 0 where a position is seen."""
    is_seen = (positions <= positions[begin:, None])[None, None]
    if own == "sdpa":
        return is_seen
    return torch.where(is_seen, 0.0, torch.finfo(like.dtype).min).to(like)

"""A pass over tokens of many requests, which lie one after the other: its pieces, and what each
piece sees."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from runtime.model.rows.memory import LEAST_ROOM, MOST_ROWS, Block


@dataclass(slots=True, eq=False)
class RowPiece:
    """Tokens of a pass that one product attends for: S tokens of each of the n rows of `block` from
    `row` on, from position `first` [n] on. Either n or S is 1. With `notes` the last tokens may be
    forgotten: these are the states of the one row, by layer and its reader, before its tokens and
    after each."""

    block: Block
    num_rows: int
    num_tokens: int
    first: torch.Tensor  # [n] int64, on the host
    row: int = 0
    notes: dict[tuple[int, object], list[dict[tuple[str, int], torch.Tensor]]] | None = None
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
    def rows(self) -> slice:
        """The rows of the block."""
        return slice(self.row, self.row + self.num_rows)

    @property
    def end(self) -> int:
        """Number of positions that the longest row has after this pass."""
        return int(self.first.max()) + self.num_tokens

    def note(self, layer: int, reader: object) -> None:
        """Note the states of a layer, of which its `reader` changes some."""
        held = self.block.states.get(layer, {})
        states = {name: rows[self.rows].clone() for name, rows in held.items()}
        self.notes.setdefault((layer, reader), []).append(states)

    def keep(self, num_tokens: int) -> None:
        """Forget the states of all tokens but the first ones. Keys and values of the others lie
        behind the length of their line, and are overwritten."""
        for (layer, _), notes in self.notes.items():
            for name, state in notes[num_tokens].items():
                if not torch.equal(state, notes[-1][name]):  # else it may be another reader's
                    self.block.states[layer][name][self.rows] = state

    def by_row(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of this piece with one row for each request: the dimensions 0 and
        `dim`, which are 1 and n * S, become n and S."""
        return tokens if self.num_rows == 1 else tokens.transpose(0, dim)


@dataclass(frozen=True, slots=True)
class RowWay:
    """The way in which a model attends by itself, `sdpa` or `eager`; the windows of its layers of
    which the attention function is not told; and whether layers keep states in place of keys and
    values."""

    own: str
    windows: Mapping[int, int] = field(default_factory=dict)
    has_states: bool = False
    takes_pass: bool = False  # as its cache


@dataclass(slots=True, eq=False)
class RowPass:
    """One pass: its pieces, whose tokens follow each other, and the way of its model. A model that
    keeps more than keys and values is given it as its cache. In `layers` Qwen4-Exp notes the
    positions of the pass, which nothing reads."""

    pieces: list[RowPiece]
    way: RowWay
    layers: Mapping[int, SimpleNamespace] = field(
        default_factory=lambda: defaultdict(lambda: SimpleNamespace(indexer_position_ids=None))
    )

    def spans(self) -> Iterator[tuple[RowPiece, slice]]:
        """Yield each piece, and the place of its tokens in the pass."""
        begin = 0
        for piece in self.pieces:
            end = begin + piece.num_rows * piece.num_tokens
            yield piece, slice(begin, end)
            begin = end

    def inputs(self) -> dict[str, object]:
        """Return the inputs of the model that name this pass."""
        cache = {"past_key_values": self} if self.way.takes_pass else {}
        return {"moectl_rows": self, "use_cache": False} | cache

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as they are: attention puts them into the rows of its piece."""
        return keys, values


def one_token_each(num_rows: int, way: RowWay) -> RowPass:
    """Return a pass over the first token of each of `num_rows` rows."""
    sizes = [min(MOST_ROWS, num_rows - start) for start in range(0, num_rows, MOST_ROWS)]
    first = torch.zeros(MOST_ROWS, dtype=torch.int64)
    return RowPass(
        [RowPiece(Block(LEAST_ROOM, size), size, 1, first[:size]) for size in sizes], way
    )

"""Plan of a shared pass: the tokens of each request, its drafts among them, and what came of
them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from runtime.model.rows.memory import Block, RowLine, States
from runtime.model.rows.passes import RowPass, RowPiece, RowWay
from runtime.session.generation.drafted import Draws, Proposal
from runtime.session.generation.prefill import Prompt
from runtime.session.generation.runner import PassRunner
from runtime.session.generation.sampling import Sampler
from runtime.session.generation.single import RequestDrafts

_UNDRAFTED = Proposal()


@dataclass(slots=True, eq=False)
class Row:
    """A request: its prompt until that is read, then its line in a block. At most `most_drafts` of
    its drafts are in a pass, by `drafts` once it is begun."""

    owner: Hashable
    prompt: Prompt
    sampler: Sampler
    most_drafts: int
    line: RowLine | None = None
    drafts: RequestDrafts | None = None


@dataclass(slots=True, eq=False)
class RowPart:
    """Tokens of a row in a pass: their place there, drafts at their end, and the line into which
    they are written; what is drawn if it `gets_token`. With `settles` the draw settles a tie."""

    row: Row
    line: RowLine
    tokens: slice
    gets_token: bool
    proposal: Proposal = _UNDRAFTED
    piece: RowPiece | None = None  # of a row with drafts
    drawn: Draws = field(default_factory=Draws)
    settles: bool = False

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    @property
    def num_drafts(self) -> int:
        return len(self.proposal.ids)

    @property
    def num_heads(self) -> int:
        """The last tokens, whose logits are drawn from."""
        return (1 + self.num_drafts) * self.gets_token

    @property
    def num_stay(self) -> int:
        """The first tokens, which stay."""
        return self.drawn.num_stay if self.num_drafts else self.num_tokens


@dataclass(slots=True)
class PassPlan:
    """Tokens of a pass, with the position of each, their parts by row, and their pieces."""

    parts: list[RowPart] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pieces: list[RowPiece] = field(default_factory=list)

    def add(
        self,
        row: Row,
        line: RowLine,
        ids: Sequence[int],
        *,
        gets_token: bool,
        proposal: Proposal = _UNDRAFTED,
    ) -> RowPart:
        """Add tokens of a row, and drafts behind them."""
        begin = len(self.ids)
        self.ids += (*ids, *proposal.ids)
        tokens = slice(begin, len(self.ids))
        self.positions += range(line.length, line.length + len(self.ids) - begin)
        part = RowPart(row, line, tokens, gets_token, proposal)
        self.parts.append(part)
        return part

    def add_block(self, block: Block, parts: Sequence[RowPart]) -> None:
        """Add the pieces of the rows of a block: each row with drafts is one of its own."""

        def run(one: tuple[int, RowPart]) -> int:
            return one[0] if one[1].num_drafts else -1

        for index, group in groupby(enumerate(parts), run):
            own = list(group)
            row, part = own[0]
            first = torch.tensor([each.line.length for _, each in own])
            piece = RowPiece(block, len(own), part.num_tokens, first, row=row)
            if index >= 0:
                piece.notes = {}
                part.piece = piece
            self.pieces.append(piece)

    @property
    def rows(self) -> np.ndarray:
        """The number of the row of each token [T]."""
        return np.arange(len(self.parts)).repeat([part.num_tokens for part in self.parts])

    @property
    def heads(self) -> list[int]:
        """The tokens whose logits are drawn from."""
        ends = ((part.tokens.stop, part.num_heads) for part in self.parts)
        return [token for end, count in ends for token in range(end - count, end)]

    def with_logits(self, logits: torch.Tensor) -> Iterator[tuple[RowPart, torch.Tensor]]:
        """Yield the parts that get tokens, with the logits [1 + k, V] of their heads."""
        drawing = [part for part in self.parts if part.gets_token]
        sizes = [part.num_heads for part in drawing]
        yield from zip(drawing, logits.split(sizes) if sizes else (), strict=True)

    @property
    def drafted(self) -> np.ndarray | None:
        """The tokens [T] that are drafts; None: none."""
        if not any(part.num_drafts for part in self.parts):
            return None
        return self._behind([part.num_tokens - part.num_drafts for part in self.parts])

    @property
    def stays(self) -> np.ndarray:
        """The tokens [T] that stay, once all is drawn."""
        return ~self._behind([part.num_stay for part in self.parts])

    @property
    def decodes(self) -> bool:
        """True if there are no tokens of prompts."""
        return all(part.row.line is part.line for part in self.parts)

    def _behind(self, counts: Sequence[int]) -> np.ndarray:
        """Return which tokens [T] are behind the first ones of each part."""
        found = np.zeros(len(self.ids), bool)
        for part, count in zip(self.parts, counts, strict=True):
            found[part.tokens.start + count : part.tokens.stop] = True
        return found


class RowDraftPasses:
    """Passes of the session's own model over the row of a request; see `DraftPasses`. What they
    write lies behind the row, and states are restored."""

    def __init__(self, session: PassRunner, way: RowWay, row: Row) -> None:
        self._session = session
        self._way = way
        self._row = row
        self._num_read = 0
        self._before: States = {}

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read tokens behind those read so far. Returns their logits [1, S, V]."""
        line = self._row.line
        begin = line.length + self._num_read
        piece = RowPiece(line.block, 1, len(ids), torch.tensor([begin]), row=line.place)
        if not self._num_read:
            self._before = line.snapshot()
        self._num_read += len(ids)
        model = self._session.opened.model
        positions = torch.arange(begin, begin + len(ids), device=model.device)
        tokens = torch.tensor([[*ids]], device=model.device)
        inputs = RowPass([piece], self._way).inputs()
        with self._session.engine.drafting():
            return model(input_ids=tokens, position_ids=positions[None], **inputs).logits

    def rollback(self) -> None:
        """Forget every token that was read here."""
        for layer, states in self._row.line.states.items() if self._num_read else ():
            for name, state in states.items():
                state.copy_(self._before[layer][name])
        self._before = {}
        self._num_read = 0

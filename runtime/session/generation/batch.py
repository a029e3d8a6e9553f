"""Many requests in one pass of a session: an expert that is loaded serves every request that wants
it.

Tokens of all running requests lie one after the other in a pass: one token of each request that is
being answered, and tiles of the prompts that are being read. A request that ends makes room for the
next one at once.
"""

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch

from artifacts.errors import detached
from runtime.model.rows.attention import attended
from runtime.model.rows.memory import RowLine, RowMemory
from runtime.model.rows.passes import RowPass, RowPiece
from runtime.session.generation.charges import Charge, Charges
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.logprobs import Logprobs
from runtime.session.generation.prefill import PrefillQueue, Prompt
from runtime.session.generation.runner import PassRunner
from runtime.session.generation.sampling import Sampler, Sampling, draw
from runtime.session.probe import widened_window

# requests, tokens, bytes
ROWS = 64
TILE = 2048
ROOM = 1 << 30
_KEPT_SHARE = 8  # of the room, one part for prompts that are kept for their beginnings
_MANY_PASSES = 1000


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of one pass for a request: its token, if it got one; whether the request is over, and
    the error that ended it; and its charge for the pass. `num_reused` tokens of its prompt were
    known from other prompts. `logprobs` are the token's, if they were asked for. An answer that
    `is_complete` is a text of its grammar that nothing may follow."""

    request: int
    owner: Hashable
    token_id: int | None
    is_over: bool
    charge: Charge
    error: Exception | None = None
    num_reused: int = 0
    logprobs: Logprobs | None = None
    is_complete: bool = False

    @classmethod
    def failed(cls, request: int, owner: Hashable, error: Exception) -> "RowResult":
        """Return the result of a request that a detached error ended before it got a token."""
        return cls(request, owner, None, True, Charge(), error)


@dataclass(frozen=True, slots=True)
class KeptPrompts:
    """Bytes of the prompts that are kept for their beginnings: the bytes in use, and the most that
    may be used; and since the start the prompts that began like an earlier one, and the kept
    ones that were forgotten to make room."""

    nbytes: int = 0
    most_nbytes: int = 0
    num_reused: int = 0
    num_forgotten: int = 0


@dataclass(slots=True, eq=False)
class _Row:
    """A request: its prompt until that is read, then its line in a block."""

    owner: Hashable
    prompt: Prompt
    sampler: Sampler
    line: RowLine | None = None


@dataclass(slots=True)
class _Plan:
    """Plan of a pass: its rows, and the number of tokens written into the line of each; the tokens,
    with the position and row of each; the pieces; and the rows that get a token."""

    rows: list[_Row] = field(default_factory=list)
    written: list[tuple[RowLine, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    pieces: list[RowPiece] = field(default_factory=list)
    last: list[tuple[_Row, int]] = field(default_factory=list)  # and the index of its last token

    def add(self, row: _Row, line: RowLine, ids: Sequence[int], *, gets_token: bool) -> None:
        self.written.append((line, len(ids)))
        self.ids += ids
        self.positions += range(line.length, line.length + len(ids))
        self.row_of += [len(self.rows)] * len(ids)
        self.rows.append(row)
        if gets_token:
            self.last.append((row, len(self.ids) - 1))


class RequestQueue:
    """The requests of a session, by number: those that wait, and those that run."""

    def __init__(self, session: PassRunner, *, rows: int) -> None:
        self.session = session
        self.rows = rows
        self._waiting: dict[int, Any] = {}
        self._running: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the session back; requests that are not over are dropped."""
        for request in (*self._waiting, *self._running):
            self.cancel(request)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def cached_nbytes(self) -> int:
        """Bytes of the keys, values and states of running requests. Any thread may ask."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """True if every request is over."""
        return not (self._waiting or self._running)

    def cancel(self, request: int) -> None:
        """End a request, if it is not over, and free its keys and values at once."""
        self._waiting.pop(request, None)
        if request in self._running:
            self._free(self._running.pop(request))

    def _free(self, row: Any) -> None:
        raise NotImplementedError

    def _begin_first(self) -> None:
        """Begin the request that has waited longest."""
        request = next(iter(self._waiting))
        self._running[request] = self._waiting.pop(request)

    def _fold(self) -> None:
        """Keep the counters of an endless run small."""
        if self.session.num_passes > _MANY_PASSES:
            self.session.engine.fold()


class RequestBatch(RequestQueue):
    """Answers many requests together. Owns the session until `close`: no other pass may run. One
    thread calls it.

    `add` requests at any time; each `step` is one pass, of at most `rows` requests and `tile`
    tokens of prompts. `room` bounds the bytes of keys and values, which lie beside the model, or
    `in_ram`: a request is begun once there is room for its whole answer, or if no other one runs.
    Prompts that are kept for their beginnings take at most `kept_nbytes` of it, by default an
    eighth. The same requests, added at the same steps, get the same answers.
    """

    def __init__(
        self,
        session: PassRunner,
        *,
        rows: int = ROWS,
        tile: int = TILE,
        room: int = ROOM,
        kept_nbytes: int | None = None,
        in_ram: bool = False,
    ) -> None:
        super().__init__(session, rows=rows)
        self.tile = tile
        self.room = room
        self._by_line: dict[RowLine, _Row] = {}
        self._charges = Charges(session.opened.shape.num_experts)
        with ExitStack() as undo:
            self._way = undo.enter_context(attended(session.opened.model))
            self.memory = RowMemory(in_ram=in_ram, coding=session.kv_coding)
            most_kept = room // _KEPT_SHARE if kept_nbytes is None else kept_nbytes
            self.prefill = PrefillQueue(
                self.memory,
                most_kept_nbytes=min(most_kept, room),
                border=tile if self._way.has_states else 0,
            )
            self._widen_window(undo)
            session.engine.steps.on_plan = self._charges.see
            undo.callback(setattr, session.engine.steps, "on_plan", None)
            self._undo = undo.pop_all()

    def _widen_window(self, undo: ExitStack) -> None:
        """Widen the prefetch window to the bytes that the link moves beside `rows` rows of a layer,
        unless the user set the window."""
        arrivals = self.session.controller.mover.arrivals
        parts = self.session.parts
        if parts.policies.brings_ahead and not parts.settings.window and len(parts.slots):
            undo.callback(setattr, arrivals, "window", arrivals.window)
            known = {"bytes_per_s": parts.tiers.bandwidth}
            arrivals.window = widened_window(
                parts.opened, arrivals.window, self.rows, self._way, **known
            )

    def close(self) -> None:
        """Give the session back, with its model as it was; requests that are not over are
        dropped."""
        self._undo.close()

    @property
    def cached_nbytes(self) -> int:
        return self.memory.nbytes + self.prefill.nbytes_under_way

    @property
    def kept(self) -> KeptPrompts:
        """Bytes of the prompts that are kept for their beginnings."""
        prefill = self.prefill
        return KeptPrompts(
            prefill.nbytes_kept, prefill.most_kept_nbytes, prefill.num_reused, prefill.num_forgotten
        )

    def add(self, prompt: torch.Tensor, sampling: Sampling, *, owner: Hashable = None) -> int:
        """Add a request with a prompt [1, S] int64, and return its number. Raises BadInput for a
        prompt that the model cannot take."""
        sampler = self.session.sampler(prompt, sampling)
        sampler.inputs.clear()  # keys and values lie in blocks
        request = self.session.new_requests(1)
        ids = prompt[0].numpy()
        read = Prompt(request, ids, len(ids) + sampling.max_new_tokens)
        self._waiting[request] = _Row(owner, read, sampler)
        return request

    def _free(self, row: _Row) -> None:
        if row.line is None:
            self.prefill.end(row.prompt, is_read=False)
        else:
            self._leave(row.line)

    def step(self) -> list[RowResult]:
        """Run one pass, if a request is not over. Returns the result for each request that took
        part. A pass that fails ends all running requests."""
        self._begin_waiting()
        try:
            plan = self._plan()
            return self._pass(plan) if plan.ids else []
        except Exception as error:
            detached(error)
            ended = [
                RowResult.failed(request, row.owner, error)
                for request, row in self._running.items()
            ]
            for result in ended:
                self.cancel(result.request)
            return ended

    def _pass(self, plan: _Plan) -> list[RowResult]:
        self._fold()
        begin_s = perf_counter()
        first_pass = self.session.num_passes
        self._charges.begin(np.array(plan.row_of), len(plan.rows))
        logits = self._forward(plan)
        drawn = draw([row.sampler for row, _ in plan.last], logits) if plan.last else []
        took = self.session.charge_since(first_pass, begin_s=begin_s)
        charges = self._charges.divide(
            took.counters, exposed_s=took.exposed_s, seconds=took.seconds
        )
        drawn = [self._traced(token) if isinstance(token, NotFinite) else token for token in drawn]
        tokens = {id(row): token for (row, _), token in zip(plan.last, drawn, strict=True)}
        self._move_on(plan)
        return [
            self._result(row, tokens.get(id(row)), charge)
            for row, charge in zip(plan.rows, charges, strict=True)
        ]

    def _traced(self, error: NotFinite) -> NotFinite:
        """Return the error with the name of its source, found by a pass of this request alone."""
        with attended(self.session.opened.model, self._way.own):
            return self.session.traced(error)

    def _begin_waiting(self) -> None:
        """Begin to read the waiting prompts for which there is room."""
        while self._waiting and len(self._running) < self.rows:
            row = next(iter(self._waiting.values()))
            if self._running and not self._has_room(row):
                return
            self._begin_first()
            self.prefill.under_way.append(row.prompt)

    def _has_room(self, row: _Row) -> bool:
        if not self.memory.token_nbytes:
            return False  # until the first pass tells the bytes of a token
        left = self.room - sum(map(self._held_nbytes, (*self._running.values(), row)))
        self.prefill.shrink(max(left, 0))
        return left >= 0

    def _held_nbytes(self, row: _Row) -> int:
        """Return the bytes for which a running request takes room: its line, and its prompt until
        that is read."""
        held = self.memory.row_nbytes(row.prompt.num_tokens)
        return held if row.line is not None else held + self.prefill.most_nbytes(row.prompt)

    def _plan(self) -> _Plan:
        plan = _Plan()
        for block, lines in self.memory.blocks.items():
            for line in lines:
                row = self._by_line[line]
                plan.add(row, line, [row.sampler.last_token], gets_token=True)
            first = torch.tensor([line.length for line in lines])
            plan.pieces.append(RowPiece(block, len(lines), 1, first))
        for prompt, length in self.prefill.tiles(self.tile):
            line = prompt.line
            end = prompt.num_read + length
            plan.pieces.append(RowPiece(line.block, 1, length, torch.tensor([line.length])))
            ids = prompt.ids[line.length : end].tolist()
            plan.add(self._running[prompt.request], line, ids, gets_token=end == len(prompt.ids))
        return plan

    def _forward(self, plan: _Plan) -> torch.Tensor:
        requests = np.array([row.prompt.request for row in plan.rows], np.int32)[plan.row_of]
        return self.session.forward_rows(
            torch.tensor(plan.ids),
            torch.tensor(plan.positions),
            RowPass(plan.pieces, self._way),
            requests=requests,
            keep=torch.tensor([index for _, index in plan.last], dtype=torch.int64),
        )

    def _move_on(self, plan: _Plan) -> None:
        """Count the tokens that the pass has written, and let prompts that are read to their ends
        join the others."""
        for line, num_tokens in plan.written:
            line.length += num_tokens
        self.prefill.note_states()
        for row, _ in plan.last:
            if row.line is None:
                with torch.inference_mode():
                    row.line = self.memory.join(row.prompt.line, row.prompt.num_tokens)
                self._by_line[row.line] = row
                self.prefill.end(row.prompt, is_read=True)

    def _result(self, row: _Row, token: int | Exception | None, charge: Charge) -> RowResult:
        request = row.prompt.request
        is_over = row.sampler.is_over
        if is_over:
            self.cancel(request)
        error = detached(token) if isinstance(token, Exception) else None
        reused = row.prompt.num_reused
        return RowResult(
            request,
            row.owner,
            None if error else token,
            is_over,
            charge,
            error,
            reused,
            None if token is None else row.sampler.logprobs,
            row.sampler.is_complete,
        )

    def _leave(self, line: RowLine) -> None:
        del self._by_line[line]
        with torch.inference_mode():
            self.memory.drop(line)

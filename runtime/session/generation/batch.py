"""Many requests in one pass of a session: an expert that is loaded serves every request that wants
it.

Tokens of all running requests lie one after the other in a pass: one token of each request that is
being answered, with drafts behind it that the pass verifies, and tiles of the prompts that are
being read. A request that ends makes room for the next one at once.
"""

from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from transformers.utils import ModelOutput

from artifacts.errors import detached
from runtime.control.counters import Counter
from runtime.drafters.base import MOST
from runtime.model.rows.attention import attended
from runtime.model.rows.memory import RowLine, RowMemory
from runtime.model.rows.passes import RowPass, RowPiece
from runtime.session.generation.charges import Charge, Charges
from runtime.session.generation.drafted import Draws, Proposal
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.logprobs import Logprobs
from runtime.session.generation.pass_plan import PassPlan, Row, RowDraftPasses, RowPart
from runtime.session.generation.prefill import PrefillQueue, Prompt
from runtime.session.generation.runner import PassRunner
from runtime.session.generation.sampling import Sampler, Sampling, draw
from runtime.session.generation.single import Drawn
from runtime.session.probe import widened_window

# requests, tokens, bytes
ROWS = 64
TILE = 2048
ROOM = 1 << 30
_KEPT_SHARE = 8  # of the room, one part for prompts that are kept for their beginnings
_MANY_PASSES = 1000


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of one pass for a request: a token, if it got one; whether the request is over, and
    the error that ended it; and its charge for the pass, which of several tokens the first one has.
    `num_reused` tokens of its prompt were known from other prompts. `logprobs` are the token's, if
    they were asked for. An answer that `is_complete` is a text of its grammar that nothing may
    follow."""

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

    @classmethod
    def each(
        cls,
        request: int,
        owner: Hashable,
        drawn: Draws,
        sampler: Sampler,
        charge: Charge,
        *,
        num_reused: int = 0,
    ) -> Iterator["RowResult"]:
        """Yield the results of a pass that gave a request any number of tokens."""
        error = detached(drawn.error) if drawn.error else None
        *first, last = [*drawn.tokens, *[None] * (not drawn.tokens or error is not None)]
        for one in first:
            logprobs = one.logprobs
            yield cls(request, owner, one.token_id, False, charge, None, num_reused, logprobs)
            charge = Charge()
        yield cls(
            request,
            owner,
            last and last.token_id,
            sampler.is_over,
            charge,
            error,
            num_reused,
            last and last.logprobs,
            sampler.is_complete,
        )


@dataclass(frozen=True, slots=True)
class KeptPrompts:
    """Bytes of the prompts that are kept for their beginnings: the bytes in use, and the most that
    may be used; and since the start the prompts that began like an earlier one, and the kept
    ones that were forgotten to make room."""

    nbytes: int = 0
    most_nbytes: int = 0
    num_reused: int = 0
    num_forgotten: int = 0


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
        self._by_line: dict[RowLine, Row] = {}
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

    def add(
        self,
        prompt: torch.Tensor,
        sampling: Sampling,
        *,
        owner: Hashable = None,
        most_drafts: int = MOST,
    ) -> int:
        """Add a request with a prompt [1, S] int64, of at most so many drafts a pass, and return
        its number. Raises BadInput for a prompt that the model cannot take."""
        sampler = self.session.sampler(prompt, sampling)
        sampler.inputs.clear()  # keys and values lie in blocks
        request = self.session.new_requests(1)
        ids = prompt[0].numpy()
        read = Prompt(request, ids, len(ids) + sampling.max_new_tokens)
        self._waiting[request] = Row(owner, read, sampler, most_drafts)
        return request

    def _free(self, row: Row) -> None:
        if row.drafts is not None:
            row.drafts.drafter.close()
        if row.line is None:
            self.prefill.end(row.prompt, is_read=False)
        else:
            self._leave(row.line)

    def step(self) -> list[RowResult]:
        """Run one pass, if a request is not over. Returns the result for each request that took
        part. A pass that fails ends all running requests."""
        try:
            with self.session.lock, torch.inference_mode():
                self._begin_waiting()
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

    def _pass(self, plan: PassPlan) -> list[RowResult]:
        self._fold()
        begin_s = perf_counter()
        first_pass = self.session.num_passes
        self._charges.begin(plan.rows, len(plan.parts))
        output = self._forward(plan)
        self._draw(plan, output.logits[0])
        self._settle(plan)
        took = self.session.charge_since(first_pass, begin_s=begin_s)
        charges = self._charges.divide(
            took.counters, exposed_s=took.exposed_s, seconds=took.seconds, own=_own_counts(plan)
        )
        for part in plan.parts:
            if isinstance(part.drawn.error, NotFinite):
                part.drawn = replace(part.drawn, error=self._traced(part.drawn.error))
        self._note(plan, output, took.seconds)
        self._move_on(plan)
        both = zip(plan.parts, charges, strict=True)
        return [result for part, charge in both for result in self._results(part, charge)]

    def _draw(self, plan: PassPlan, logits: torch.Tensor) -> None:
        """Draw the tokens of a pass by the logits [N, V] of its heads."""
        verifier = self.session.verifier
        plain = []
        for part, own in plan.with_logits(logits):
            drafts = part.row.drafts
            if part.num_drafts:
                part.drawn = verifier.draws(drafts.sampler, own, part.proposal.ids)
                drafts.wide = part.drawn.tie
                continue
            plain.append((part, own))
            if drafts is not None and drafts.wide is not None:
                verifier.note_tie(drafts.wide, own)
                drafts.wide = None
                part.settles = True
        if not plain:
            return
        of_plain = logits if len(plain) == len(logits) else torch.cat([own for _, own in plain])
        samplers = [part.row.sampler for part, _ in plain]
        for (part, _), token in zip(plain, draw(samplers, of_plain), strict=True):
            is_error = isinstance(token, Exception)
            drawn = [] if is_error else [Drawn(token, part.row.sampler.logprobs)]
            part.drawn = Draws(drawn, error=token if is_error else None)

    def _settle(self, plan: PassPlan) -> None:
        """Forget the drafts of a pass that do not stay, and tell the session which do."""
        if (drafted := plan.drafted) is None:
            return
        for part in plan.parts:
            if part.piece is not None:
                part.piece.keep(part.num_stay)
        self.session.verifier.settle(drafted, plan.stays)

    def _note(self, plan: PassPlan, output: ModelOutput, pass_s: float) -> None:
        """Tell drafters what a pass read, and what it took if it only decoded."""
        verifier = self.session.verifier
        if verifier is None:
            return
        hidden = output.hidden_states[-1] if verifier.kind.wants_hidden else None
        for part in plan.parts:
            if part.row.drafts is not None and part.num_stay:
                tokens = part.tokens
                own = None if hidden is None else (hidden[:, tokens],)
                read = plan.ids[tokens.start : tokens.start + part.num_stay]
                part.row.drafts.drafter.note(read, SimpleNamespace(hidden_states=own))
        if plan.decodes:
            verifier.note_pass([one.proposal.part(one.drawn) for one in plan.parts], pass_s)

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
            if self.session.verifier and row.most_drafts:
                passes = RowDraftPasses(self.session, self._way, row)
                row.drafts = self.session.verifier.begin(row.sampler, passes, row.most_drafts)

    def _has_room(self, row: Row) -> bool:
        if not self.memory.token_nbytes:
            return False  # until the first pass tells the bytes of a token
        left = self.room - sum(map(self._held_nbytes, (*self._running.values(), row)))
        self.prefill.shrink(max(left, 0))
        return left >= 0

    def _held_nbytes(self, row: Row) -> int:
        """Return the bytes for which a running request takes room: its line, and its prompt until
        that is read."""
        held = self.memory.row_nbytes(row.prompt.num_tokens)
        return held if row.line is not None else held + self.prefill.most_nbytes(row.prompt)

    def _plan(self) -> PassPlan:
        plan = PassPlan()
        proposals = self._proposals()
        for block, lines in self.memory.blocks.items():
            parts = []
            for line in lines:
                row = self._by_line[line]
                own = {"gets_token": True, "proposal": next(proposals)}
                parts.append(plan.add(row, line, [row.sampler.last_token], **own))
            plan.add_block(block, parts)
        for prompt, length in self.prefill.tiles(self.tile):
            line = prompt.line
            end = prompt.num_read + length
            plan.pieces.append(RowPiece(line.block, 1, length, torch.tensor([line.length])))
            ids = prompt.ids[line.length : end].tolist()
            plan.add(self._running[prompt.request], line, ids, gets_token=end == len(prompt.ids))
        return plan

    def _proposals(self) -> Iterator[Proposal]:
        """Return the drafts of all lines, in the order of their blocks."""
        lines = [line for of_block in self.memory.blocks.values() for line in of_block]
        if not (self.session.verifier and lines):
            return repeat(Proposal())
        drafts = [self._by_line[line].drafts for line in lines]
        return iter(self.session.verifier.propose(drafts))

    def _forward(self, plan: PassPlan) -> ModelOutput:
        requests = np.array([part.row.prompt.request for part in plan.parts], np.int32)
        return self.session.forward_rows(
            torch.tensor(plan.ids),
            torch.tensor(plan.positions),
            RowPass(plan.pieces, self._way),
            requests=requests[plan.rows],
            keep=torch.tensor(plan.heads, dtype=torch.int64),
            drafted=plan.drafted,
        )

    def _move_on(self, plan: PassPlan) -> None:
        """Count the tokens that the pass has written and that stay, and let prompts that are read
        to their ends join the others."""
        for part in plan.parts:
            part.line.length += part.num_stay
        self.prefill.note_states()
        for part in plan.parts:
            row = part.row
            if part.gets_token and row.line is None:
                row.line = self.memory.join(row.prompt.line, row.prompt.num_tokens)
                self._by_line[row.line] = row
                self.prefill.end(row.prompt, is_read=True)

    def _results(self, part: RowPart, charge: Charge) -> Iterator[RowResult]:
        row = part.row
        request = row.prompt.request
        if row.sampler.is_over:
            self.cancel(request)
        own = {"num_reused": row.prompt.num_reused}
        return RowResult.each(request, row.owner, part.drawn, row.sampler, charge, **own)

    def _leave(self, line: RowLine) -> None:
        del self._by_line[line]
        with torch.inference_mode():
            self.memory.drop(line)


def _own_counts(plan: PassPlan) -> dict[Counter, list[int]]:
    """Return what each row of a pass counted of drafts."""
    return {
        Counter.DRAFTED: [part.num_drafts for part in plan.parts],
        Counter.ACCEPTED: [
            max(part.num_stay - 1, 0) * bool(part.num_drafts) for part in plan.parts
        ],
        Counter.TIES: [int(part.settles) for part in plan.parts],
    }

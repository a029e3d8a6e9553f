"""Verification of drafts: one pass reads the last token and drafts behind it, and the request draws
at each place as it does undrafted, until a draw differs from its draft.

A pass of several tokens may round otherwise than passes of one. A greedy choice that is closer than
such rounding is a tie: a pass that reads one token of the request settles it. Drawn tokens need
none: they are drawn from the probabilities of a pass of the model either way.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from runtime.control.counters import Counter
from runtime.drafters.base import (
    MOST,
    Draft,
    DrafterKind,
    DraftPart,
    DraftPasses,
    FixedLength,
    Lengths,
    kind_of,
)
from runtime.drafters.length import MeasuredLengths
from runtime.engine.engine import Engine
from runtime.engine.fixed_past import twin_of
from runtime.model.open import MoeModel
from runtime.model.rows.rollback import forgettable
from runtime.session.generation.sampling import Sampler, draw
from runtime.session.generation.single import Drawn, Generation, RequestDrafts

_NUM_MEASURED = 3  # tokens of a session that are read both ways
_SAFETY = 4.0  # of rounding that is allowed for, over the largest that was measured
_LEAST = 2.0  # of the relative steps of the logits' type: each of two may move by one


@dataclass(slots=True)
class Rounding:
    """The largest difference of logits between a pass of several tokens and a pass of one, as a
    share of the largest logit; `num` tokens were read both ways."""

    share: float = 0.0
    num: int = 0

    def note(self, wide: torch.Tensor, alone: torch.Tensor) -> None:
        """Note the logits [1, V] of one token by a wide pass and by its own."""
        largest = float(alone.abs().max())
        difference = float((wide - alone).abs().max())
        self.num += 1
        if largest and difference < float("inf"):
            self.share = max(self.share, difference / largest)

    def margin(self, logits: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the difference between two of the logits [1, V], computed in a type, that rounding
        may turn round."""
        share = max(_SAFETY * self.share, _LEAST * torch.finfo(dtype).eps)
        return share * float(logits.abs().max())


@dataclass(slots=True)
class PassCosts:
    """Passes of one kind: their number, tokens and seconds, with those in which was drafted."""

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def receipt(self) -> dict[str, float]:
        """Return the passes, and the mean tokens and milliseconds of one."""
        tokens = self.tokens / self.passes
        pass_ms = self.seconds / self.passes * 1e3
        return {"passes": self.passes, "tokens_per_pass": tokens, "pass_ms": pass_ms}


@dataclass(slots=True)
class DraftTally:
    """What drafting did in a session. `costs` are by the requests that shared a pass and the most
    drafts that one of them had."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    ties: int = 0
    rounding: Rounding = field(default_factory=Rounding)
    costs: dict[tuple[int, int], PassCosts] = field(default_factory=dict)

    def note_pass(self, parts: Sequence[DraftPart], seconds: float) -> None:
        """Note a pass in which all requests were decoding."""
        kind = len(parts), max(part.num_drafted for part in parts)
        costs = self.costs.setdefault(kind, PassCosts())
        costs.passes += 1
        costs.tokens += sum(part.num_tokens for part in parts)
        costs.seconds += seconds

    @property
    def saved_s(self) -> float:
        """Seconds that the tokens of passes with drafts would have taken at the pace of those
        without, less those that they took: an estimate, without passes that have none to be
        compared with."""
        saved_s = 0.0
        for (num_requests, k), costs in self.costs.items():
            plain = self.costs.get((num_requests, 0))
            if k and plain:
                saved_s += costs.tokens * plain.seconds / plain.tokens - costs.seconds
        return saved_s


def _lengths(kind: DrafterKind, k: int | None) -> Lengths:
    """Return what chooses how many tokens are drafted: some drafters choose among others too."""
    if k is not None:
        return FixedLength(k, kind.name)
    return getattr(kind, "lengths", None) or MeasuredLengths([kind.name])


class OwnPasses:
    """Passes of the session's own model over a copy of a request's cache; see `DraftPasses`."""

    def __init__(self, model: PreTrainedModel, engine: Engine, generation: Generation) -> None:
        self._model = model
        self._engine = engine
        self._generation = generation
        self._past: Cache | None = None
        self._ids: list[int] = []
        self._chosen: list[np.ndarray] = []

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read tokens behind those read so far. Returns their logits [1, S, V]."""
        if self._past is None:
            self._past = twin_of(self._generation.sampler.inputs["past_key_values"])
            self._clear()
        tokens = torch.tensor([[*ids]], device=self._model.device)
        with self._engine.drafting() as chosen:
            output = self._model(
                input_ids=tokens, past_key_values=self._past, use_cache=True, return_dict=True
            )
        self._ids += ids
        self._chosen.append(np.stack(chosen, axis=1))
        return output.logits

    def rollback(self) -> None:
        """Forget every token that was read here."""
        self._past = None

    def take_foretold(self, ids: Sequence[int]) -> np.ndarray | None:
        """Return the experts [T, L, K] that the routers chose for these tokens since this was asked
        last, -1 for those that were not read; None for none."""
        pairs = zip(ids, self._ids, strict=False)
        num_read = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        foretold = None
        if num_read:
            chosen = np.concatenate(self._chosen)
            foretold = np.full((len(ids), *chosen.shape[1:]), -1, np.int32)
            foretold[:num_read] = chosen[:num_read]
        self._clear()
        return foretold

    def _clear(self) -> None:
        self._ids.clear()
        self._chosen.clear()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of a request for one pass, the name of their drafter, and its seconds."""

    ids: Sequence[int] = ()
    name: str = ""
    seconds: float = 0.0

    def part(self, drawn: "Draws") -> DraftPart:
        """Return the part that the request had in the pass, by what was drawn in it."""
        num_tokens = len(drawn.tokens)
        is_open = drawn.tie is not None or drawn.error is not None
        num_right = min(num_tokens if is_open else num_tokens - 1, len(self.ids))
        return DraftPart(self.name, len(self.ids), num_right, num_tokens, self.seconds)


@dataclass(frozen=True, slots=True)
class Draws:
    """What a request drew by a pass: its tokens, and behind them maybe the logits [1, V] of a tie,
    or the error that ended it."""

    tokens: list[Drawn] = field(default_factory=list)
    tie: torch.Tensor | None = None
    error: Exception | None = None

    @property
    def num_stay(self) -> int:
        """The tokens that the pass read and that stay: behind a tie the last one is read again."""
        return len(self.tokens) + (self.error is not None)


class DraftVerifier:
    """Answers requests of a session with drafts. `run` is its `run_pass`, `read_one` runs the pass
    over the last token of a request and returns its logits [1, V]."""

    def __init__(
        self,
        draft: Draft,
        opened: MoeModel,
        *,
        engine: Engine,
        run: Callable[..., object],
        read_one: Callable[[Generation], torch.Tensor],
    ) -> None:
        self.kind: DrafterKind = kind_of(draft.name).open(opened, draft.argument)
        self.lengths = _lengths(self.kind, draft.k)
        self.tally = DraftTally()
        self._model = opened.model
        self._num_tokens = opened.model.get_input_embeddings().num_embeddings
        self._measuring_s = 0.0
        self._engine = engine
        self._controller = engine.controller
        self._watcher = engine.watcher
        self._run = run
        self._read_one = read_one
        if engine.captured:
            engine.captured.most_tokens = 1 + (draft.k or MOST)

    def begin(self, sampler: Sampler, passes: DraftPasses, most: int = MOST) -> RequestDrafts:
        """Return the drafter of a request, of at most so many drafts a pass."""
        tokens = sampler.tokens[0].tolist()
        drafter = self.kind.begin(tokens, passes)
        return RequestDrafts(sampler, drafter, passes, most, [*tokens])

    def begin_alone(self, generation: Generation, most: int) -> None:
        """Give a request that shares no pass its drafter."""
        generation.sampler.inputs |= self.asked
        passes = OwnPasses(self._model, self._engine, generation)
        generation.drafts = self.begin(generation.sampler, passes, most)

    @property
    def asked(self) -> dict[str, object]:
        """Inputs that a pass needs beside its own."""
        # those of the last layer only
        return {"output_hidden_states": -1} if self.kind.wants_hidden else {}

    def propose(self, requests: Sequence[RequestDrafts | None]) -> list[Proposal]:
        """Return drafts for each of the requests that share the next pass; None has none."""
        self.lengths.share(len(requests))
        most = self.lengths.next()
        return [Proposal() if one is None else self._proposal(one, most) for one in requests]

    def _proposal(self, drafts: RequestDrafts, most: int) -> Proposal:
        begin_s = time.perf_counter()
        ids = [*takewhile(range(self._num_tokens).__contains__, drafts.propose(most))]
        return Proposal(ids, self.lengths.chosen, time.perf_counter() - begin_s)

    def step(self, generation: Generation) -> list[Drawn]:
        """Run a pass of a request, over its prompt first. Returns its tokens, one or several.
        Raises what a draw raises."""
        self._measuring_s = 0.0
        drafts = generation.drafts
        before = generation.num_read
        proposal = self.propose([drafts])[0] if before else Proposal()
        unread = [generation.sampler.last_token, *proposal.ids]
        self._watcher.foretold = drafts.passes.take_foretold(unread)
        begin_s = time.perf_counter()
        if proposal.ids:
            drawn, output = self._verified(generation, proposal.ids)
        else:
            drawn, output = self._alone(generation)
        if before:
            pass_s = time.perf_counter() - begin_s - self._measuring_s
            self.note_pass([proposal.part(Draws(drawn))], pass_s)
        read = generation.sampler.tokens[0, before : generation.num_read].tolist()
        drafts.drafter.note(read, output)
        return drawn

    def note_pass(self, parts: Sequence[DraftPart], pass_s: float) -> None:
        """Learn from a pass of so many seconds in which all requests were decoding."""
        self.lengths.note_pass(parts, pass_s=pass_s)
        self.tally.note_pass(parts, pass_s + sum(part.draft_s for part in parts))

    def _alone(self, generation: Generation) -> tuple[list[Drawn], object]:
        logits = self._read_one(generation)
        return [drawn_by(generation.sampler, logits)], generation.output

    def _verified(
        self, generation: Generation, drafts: Sequence[int]
    ) -> tuple[list[Drawn], object]:
        """Return the tokens that a pass over drafts gives, and its output."""
        model = self._model
        sampler = generation.sampler
        cache = sampler.inputs["past_key_values"]
        places = np.arange(len(drafts) + 1)
        drafted = places > 0
        requests = np.full(len(drafted), generation.request, np.int32)
        with forgettable(model, cache) as past:
            output = self._run(
                requests, drafted=drafted, **generation.next_inputs(model, drafts), return_dict=True
            )
        drawn = self.draws(sampler, output.logits[0], drafts)
        if drawn.error is not None:
            raise drawn.error
        num_stay = drawn.num_stay
        past.forget(len(drafted) - num_stay)
        if num_stay:
            generation.move_on(model, output, num_read=num_stay, num_new=num_stay)
        self.settle(drafted, places < num_stay)
        if drawn.tie is not None:
            drawn.tokens.append(self._settled(generation, drawn.tie))
        return drawn.tokens, output

    def draws(self, sampler: Sampler, logits: torch.Tensor, drafts: Sequence[int]) -> Draws:
        """Draw by logits [k + 1, V] until a token differs from its draft or ends the answer, until
        a tie or an error."""
        rounding = self.tally.rounding
        drawn: list[Drawn] = []
        for row, draft in zip(logits.float().split(1), (*drafts, None), strict=True):
            if sampler.is_greedy:
                is_last = draft is None or int(row.argmax()) != draft
                if is_last and rounding.num < _NUM_MEASURED:
                    return Draws(drawn, row)
                if sampler.gap(row) <= rounding.margin(row, logits.dtype):
                    return Draws(drawn, row)
            try:
                drawn.append(drawn_by(sampler, row))
            except Exception as error:  # which ends this request alone
                return Draws(drawn, error=error)
            if sampler.is_over or drawn[-1].token_id != draft:
                break
        return Draws(drawn)

    def _settled(self, generation: Generation, wide: torch.Tensor) -> Drawn:
        """Return the token that a pass of its own gives in the place of logits [1, V] of a wide
        one."""
        begin_s = time.perf_counter()
        is_measured = self.tally.rounding.num < _NUM_MEASURED
        alone = self._read_one(generation)
        self.note_tie(wide, alone)
        if is_measured:  # which is done once, and no cost of drafts
            self._measuring_s = time.perf_counter() - begin_s
        return drawn_by(generation.sampler, alone)

    def note_tie(self, wide: torch.Tensor, alone: torch.Tensor) -> None:
        """Note that a pass over one token of a request gave logits [1, V] in the place of those of
        a wide one."""
        self.tally.ties += 1
        self.tally.rounding.note(wide, alone.float())
        self._controller.counters.add(Counter.TIES, 0, 1)

    def settle(self, drafted: np.ndarray, stays: np.ndarray) -> None:
        """Tell what became of the drafts of a pass, and which of its tokens [T] stay: others are
        rejected, or read again."""
        accepted = drafted & stays
        self._engine.settle(accepted)
        if self._watcher.on_settle is not None:
            self._watcher.on_settle(drafted & ~accepted, ~stays)
        self.tally.passes += 1
        self.tally.drafted += int(drafted.sum())
        self.tally.accepted += int(accepted.sum())

    def receipt(self) -> dict[str, object]:
        """Return the drafter, its lengths, what became of its drafts, and what passes took by the
        requests that shared them and the most drafts of one."""
        tally = self.tally
        measured: dict[str, dict[str, object]] = {}
        for (num_requests, k), costs in [*tally.costs.items()]:
            measured.setdefault(str(num_requests), {})[str(k)] = costs.receipt()
        return {
            "drafter": self.kind.name,
            **self.lengths.receipt(),
            "passes": tally.passes,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "ties": tally.ties,
            "rounding": tally.rounding.share,
            "measured": measured,
            "saved_s_estimated": tally.saved_s,
            **self.kind.receipt(),
        }


def drawn_by(sampler: Sampler, logits: torch.Tensor) -> Drawn:
    """Draw a token by logits [1, V]. Raises what ends the request."""
    [token] = draw([sampler], logits)
    if isinstance(token, Exception):
        raise token
    return Drawn(token, sampler.logprobs)

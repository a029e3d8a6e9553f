"""Verification of drafts: one pass reads the last token and drafts behind it, and the request draws
at each place as it does undrafted, until a draw differs from its draft.

A pass of several tokens may round otherwise than passes of one. A greedy choice that is closer than
such rounding is a tie: a pass of its own settles it. Drawn tokens need none: they are drawn from
the probabilities of a pass of the model either way.
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
from runtime.drafters.base import MOST, Draft, DrafterKind, FixedLength, Lengths, kind_of
from runtime.drafters.length import MeasuredLengths
from runtime.engine.engine import Engine
from runtime.engine.fixed_past import twin_of
from runtime.model.open import MoeModel
from runtime.model.rows.rollback import forgettable
from runtime.session.generation.sampling import draw
from runtime.session.generation.single import Drawn, Generation

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
class DraftTally:
    """What drafting did in a session."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    ties: int = 0
    rounding: Rounding = field(default_factory=Rounding)


def _lengths(kind: DrafterKind, k: int | None) -> Lengths:
    """Return what chooses how many tokens are drafted: some drafters choose among others too."""
    if k is not None:
        return FixedLength(k)
    return getattr(kind, "lengths", None) or MeasuredLengths([kind.name])


class OwnPasses:
    """Passes of the session's own model over a copy of a request's cache; see `DraftPasses`."""

    def __init__(self, model: PreTrainedModel, engine: Engine, generation: Generation) -> None:
        self._model = model
        self._engine = engine
        self._generation = generation
        self._past: Cache | None = None

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read tokens behind those read so far. Returns their logits [1, S, V]."""
        if self._past is None:
            self._past = twin_of(self._generation.sampler.inputs["past_key_values"])
        tokens = torch.tensor([[*ids]], device=self._model.device)
        with self._engine.drafting():
            output = self._model(
                input_ids=tokens, past_key_values=self._past, use_cache=True, return_dict=True
            )
        return output.logits

    def rollback(self) -> None:
        """Forget every token that was read here."""
        self._past = None


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

    def begin(self, generation: Generation) -> None:
        """Give a request its drafter."""
        if self.kind.wants_hidden:  # those of the last layer only
            generation.sampler.inputs["output_hidden_states"] = -1
        generation.passes = OwnPasses(self._model, self._engine, generation)
        prompt = generation.sampler.tokens[0].tolist()
        generation.drafter = self.kind.begin(prompt, generation.passes)

    def step(self, generation: Generation) -> list[Drawn]:
        """Run a pass of a request, over its prompt first. Returns its tokens, one or several.
        Raises what a draw raises."""
        self._measuring_s = 0.0
        begin_s = time.perf_counter()
        drafts = self._drafts(generation) if generation.num_read else []
        draft_s = time.perf_counter() - begin_s
        before = generation.num_read
        if drafts:
            drawn, output = self._verified(generation, drafts)
        else:
            drawn, output = self._alone(generation)
        if before:
            pass_s = time.perf_counter() - begin_s - draft_s - self._measuring_s
            self.lengths.note(len(drafts), len(drawn) - 1, pass_s=pass_s, draft_s=draft_s)
        read = generation.sampler.tokens[0, before : generation.num_read].tolist()
        generation.drafter.note(read, output)
        return drawn

    def _drafts(self, generation: Generation) -> list[int]:
        sampler = generation.sampler
        most = min(self.lengths.next(), sampler.num_left - 1)
        if most < 1:
            return []
        tokens = sampler.tokens[0].tolist()
        drafts = [*generation.drafter.propose(tokens, most)][:most]
        generation.passes.rollback()
        return [*takewhile(range(self._num_tokens).__contains__, drafts)]

    def _alone(self, generation: Generation) -> tuple[list[Drawn], object]:
        logits = self._read_one(generation)
        return [drawn_by(generation, logits)], generation.output

    def _verified(
        self, generation: Generation, drafts: Sequence[int]
    ) -> tuple[list[Drawn], object]:
        """Return the tokens that a pass over drafts gives, and its output."""
        model = self._model
        sampler = generation.sampler
        cache = sampler.inputs["past_key_values"]
        drafted = np.arange(len(drafts) + 1) > 0
        requests = np.full(len(drafted), generation.request, np.int32)
        with forgettable(model, cache) as past:
            output = self._run(
                requests, drafted=drafted, **generation.next_inputs(model, drafts), return_dict=True
            )
        drawn, tie = self._draws(generation, output.logits[0], drafts)
        num_stay = len(drawn)
        past.forget(len(drafted) - num_stay)
        if drawn:
            generation.move_on(model, output, num_read=num_stay, num_new=num_stay)
        self._settle(drafted, num_stay)
        if tie is not None:
            drawn.append(self._settled(generation, tie))
        return drawn, output

    def _draws(
        self, generation: Generation, logits: torch.Tensor, drafts: Sequence[int]
    ) -> tuple[list[Drawn], torch.Tensor | None]:
        """Draw by logits [k + 1, V] until a token differs from its draft or ends the answer.
        Returns the tokens, and the logits [1, V] that are to be settled, if there are any."""
        sampler = generation.sampler
        rounding = self.tally.rounding
        drawn: list[Drawn] = []
        for row, draft in zip(logits.float().split(1), (*drafts, None), strict=True):
            if sampler.is_greedy:
                is_last = draft is None or int(row.argmax()) != draft
                if is_last and rounding.num < _NUM_MEASURED:
                    return drawn, row
                if sampler.gap(row) <= rounding.margin(row, logits.dtype):
                    return drawn, row
            drawn.append(drawn_by(generation, row))
            if sampler.is_over or drawn[-1].token_id != draft:
                break
        return drawn, None

    def _settled(self, generation: Generation, wide: torch.Tensor) -> Drawn:
        """Return the token that a pass of its own gives in the place of logits [1, V] of a wide
        one."""
        begin_s = time.perf_counter()
        alone = self._read_one(generation)
        self.tally.ties += 1
        rounding = self.tally.rounding
        if rounding.num < _NUM_MEASURED:  # which is done once, and no cost of drafts
            self._measuring_s = time.perf_counter() - begin_s
        rounding.note(wide, alone.float())
        self._controller.counters.add(Counter.TIES, 0, 1)
        return drawn_by(generation, alone)

    def _settle(self, drafted: np.ndarray, num_stay: int) -> None:
        """Tell what became of the drafts of a pass, of whose tokens the first `num_stay` stay."""
        accepted = drafted & (np.arange(len(drafted)) < num_stay)
        self._engine.settle(accepted)
        if self._watcher.on_settle is not None:
            self._watcher.on_settle(drafted & ~accepted, len(drafted) - num_stay)
        self.tally.passes += 1
        self.tally.drafted += int(drafted.sum())
        self.tally.accepted += int(accepted.sum())

    def receipt(self) -> dict[str, object]:
        """Return the drafter, its lengths, and what became of its drafts."""
        tally = self.tally
        return {
            "drafter": self.kind.name,
            **self.lengths.receipt(),
            "passes": tally.passes,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "ties": tally.ties,
            "rounding": tally.rounding.share,
            **self.kind.receipt(),
        }


def drawn_by(generation: Generation, logits: torch.Tensor) -> Drawn:
    """Draw a token by logits [1, V]. Raises what ends the request."""
    [token] = draw([generation.sampler], logits)
    if isinstance(token, Exception):
        raise token
    return Drawn(token, generation.sampler.logprobs)

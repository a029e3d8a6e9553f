"""Requests of a batch that share no pass: they take turns, with the same calls and results."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from transformers import PreTrainedTokenizerBase

from artifacts.errors import detached
from artifacts.tables import Results
from runtime.drafters.base import MOST
from runtime.model.kv_cache import cache_nbytes
from runtime.model.rows.attention import reason_not_joined
from runtime.policies import describe
from runtime.session.generation.batch import (
    ROOM,
    ROWS,
    TILE,
    KeptPrompts,
    RequestBatch,
    RequestQueue,
    RowResult,
)
from runtime.session.generation.charges import Charge
from runtime.session.generation.drafted import Draws
from runtime.session.generation.runner import PassRunner
from runtime.session.generation.sampling import Sampling, check_prompt
from runtime.session.generation.single import Generation
from runtime.session.generation.stream import Answer, Effort, TokenTiming

# Passes of a request before the next one's turn: more delay the others, fewer lower the hit rate,
# since every change of request evicts some experts of the last one (docs/lab/decisions.md).
PASSES = 4


@dataclass(slots=True, eq=False)
class _Request:
    owner: Hashable
    prompt: torch.Tensor
    sampling: Sampling
    most_drafts: int
    generation: Generation | None = None
    num_passes: int = 0


class RoundRobin(RequestQueue):
    """Answers at most `rows` requests at a time, in turns of `PASSES` passes, each by a generation
    of its own. An answer is bit for bit the one that the request would get alone, where the
    policies lose nothing. Calls and results are those of `RequestBatch`."""

    kept = KeptPrompts()  # none

    def __init__(self, session: PassRunner, *, rows: int = 1) -> None:
        # Where residency follows the prompt, a second request would change it during the answer to
        # the first.
        super().__init__(session, rows=1 if session.parts.policies.residency.places else rows)
        self._num_added = 0

    def add(
        self,
        prompt: torch.Tensor,
        sampling: Sampling,
        *,
        owner: Hashable = None,
        most_drafts: int = MOST,
    ) -> int:
        """Add a request, as `RequestBatch.add` does."""
        check_prompt(self.session.opened.model, prompt, sampling.max_new_tokens)
        self._num_added += 1
        self._waiting[self._num_added] = _Request(owner, prompt, sampling, most_drafts)
        return self._num_added

    def step(self) -> list[RowResult]:
        """Run one pass of the request that has the turn, with results as of `RequestBatch.step`."""
        while self._waiting and len(self._running) < self.rows:
            self._begin_first()
        if not self._running:
            return []
        request, asked = next(iter(self._running.items()))
        results = self._pass(request, asked)
        if results[-1].is_over:
            self.cancel(request)
        elif asked.num_passes % PASSES == 0:
            self._running[request] = self._running.pop(request)  # the last in turn
        return results

    @property
    def cached_nbytes(self) -> int:
        generations = [asked.generation for asked in [*self._running.values()]]
        pasts = [one.sampler.inputs.get("past_key_values") for one in generations if one]
        return sum(map(cache_nbytes, filter(None, pasts)))

    def _pass(self, request: int, asked: _Request) -> list[RowResult]:
        """Run a pass. Returns a result for each token; the first one has the charge of all."""
        self._fold()
        asked.num_passes += 1
        try:
            if asked.generation is None:
                most = asked.most_drafts
                asked.generation = self.session.begin(
                    asked.prompt, asked.sampling, most_drafts=most
                )
            drawn, charge = self.session.step(asked.generation)
        except Exception as error:
            return [RowResult.failed(request, asked.owner, detached(error))]
        sampler = asked.generation.sampler
        return [*RowResult.each(request, asked.owner, Draws(drawn), sampler, charge)]

    def _free(self, asked: _Request) -> None:
        if asked.generation is not None:
            asked.generation.close()


def open_batch(
    session: PassRunner,
    *,
    rows: int,
    tile: int = TILE,
    room: int = ROOM,
    kept_nbytes: int | None = None,
    in_ram: bool = False,
) -> RequestBatch | RoundRobin:
    """Return a `RequestBatch` of `rows` rows. For one row, and where requests cannot share a pass,
    return a `RoundRobin`, which answers one after the other; the receipt then gives the reason."""
    reason = why_one_by_one(session)
    if rows > 1 and reason is None:
        return RequestBatch(
            session, rows=rows, tile=tile, room=room, kept_nbytes=kept_nbytes, in_ram=in_ram
        )
    line = f"batch: requests are answered one at a time: {reason}"
    if rows > 1 and line not in session.fallbacks:
        session.fallbacks.append(line)
    return RoundRobin(session)


def answer_all(
    session: PassRunner,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    *,
    receipt: Callable[[], dict[str, object]],
) -> Results[Answer]:
    """Return the answers to prompts [1, S], which share passes where the model can, with the
    receipt as it is at the end. Raises BadInput for a prompt that cannot be answered."""
    begin_s = perf_counter()
    with open_batch(session, rows=ROWS) as batch:
        asked = {batch.add(prompt, sampling): _Answered() for prompt in prompts}
        while not batch.is_idle:
            for result in batch.step():
                if result.error:
                    raise result.error
                asked[result.request].take(result, perf_counter() - begin_s)
    tokenizer = session.opened.tokenizer
    said = receipt()
    return Results(one.answer(tokenizer, said) for one in asked.values())


@dataclass(slots=True)
class _Answered:
    token_ids: list[int] = field(default_factory=list)
    timing: TokenTiming = field(default_factory=TokenTiming)
    charge: Charge = field(default_factory=Charge)

    def take(self, result: RowResult, seconds: float) -> None:
        self.charge += result.charge
        if result.token_id is not None:
            self.token_ids.append(result.token_id)
            self.timing.seconds.append(seconds)

    def answer(self, tokenizer: PreTrainedTokenizerBase, receipt: dict[str, object]) -> Answer:
        text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        timing = self.timing
        effort = Effort.of(self.charge)
        return Answer(self.token_ids, text, effort, timing.ttft_ms, timing.tpot_ms, receipt)


def why_one_by_one(session: PassRunner) -> str | None:
    """Return the reason why the requests of a session cannot share a pass, None if they can."""
    policy = session.parts.policies.residency
    if policy.places:
        return f"--residency {describe(policy)} chooses the experts of the fast tier by the prompt"
    return reason_not_joined(session.opened.model)

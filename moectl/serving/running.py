"""The requests that are being answered, on one session: each pass gives some of them a token."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from artifacts.errors import Problem
from moectl.serving.guard import TURNS, ServerLimits
from moectl.serving.jobs import Done, Failed, GenerationJob, LoggedToken, LoggedTokens, TokenCost
from moectl.serving.tally import Tally
from moectl.shared.batch_size import batch_size
from moectl.shared.opening import cached_nbytes
from moectl.show.answers import in_a_line_of_many
from runtime.control.counters import Counter, by_layer, totals
from runtime.session.generation.batch import KeptPrompts, RowResult
from runtime.session.generation.charges import Charge
from runtime.session.generation.grammar.grammars import NoToken
from runtime.session.generation.logprobs import Logprobs
from runtime.session.generation.round_robin import RoundRobin, open_batch, why_one_by_one
from runtime.session.generation.stream import Detokeniser, Stops, TokenTiming
from runtime.session.replies.pieces import CallPiece, Piece, ReasoningPiece, TextPiece
from runtime.session.session import Session

USUAL_ROWS = 32
# so a lone request is not slower by default (docs/lab/serve.md has the figures)
_DECODED = "compiled layers answer one at a time, each faster; --batch N shares passes"
_SHARES = 4  # of the memory for keys and values, one for an answer of unknown length
_LEAST_SHARE = 1024  # tokens
TILE = 512  # tokens of prompts in a pass, for which the other requests wait

_log = logging.getLogger("moectl")


class RunningRequests:
    """Owns the session's passes until `close`. One thread calls it; `over` is told how each request
    ended, once its row is free. `unasked` is the most tokens of an answer whose request does not
    say how many, None for as many as have room: in shared passes its keys and values have their
    memory from the start."""

    def __init__(
        self,
        session: Session,
        limits: ServerLimits,
        tally: Tally,
        *,
        preset: str,
        over: Callable[[str], None],
    ) -> None:
        self._session = session
        self._tally = tally
        self._preset = preset
        self._over = over
        self._active: dict[int, ActiveRequest] = {}  # by its number in the batch
        self.unasked: int | None = limits.max_tokens
        is_chosen = limits.num_rows is None
        self._why_turns = why_one_by_one(session)
        if is_chosen and session.parts.dense is not None:
            self._why_turns = self._why_turns or _DECODED
        if limits.shares_passes and not (is_chosen and self._why_turns):
            size = batch_size(session, limits.num_rows, usual=USUAL_ROWS)
            own = {"tile": TILE, "room": size.room, "kept_nbytes": limits.kept_nbytes}
            self._batch = open_batch(session, rows=size.rows, **own)
            dtype = session.parts.settings.kv_cache_dtype
            share = size.room // _SHARES // cached_nbytes(session.opened, dtype)
            self.unasked = min(limits.max_tokens or share, max(share, _LEAST_SHARE))
        else:
            self._batch = RoundRobin(session, rows=limits.num_rows or TURNS)

    def __len__(self) -> int:
        return len(self._active)

    @property
    def kept(self) -> KeptPrompts:
        """Bytes of the prompts that are kept for their beginnings, and the bytes that they may
        take."""
        return self._batch.kept

    @property
    def num_rows(self) -> int:
        """Requests that are answered at a time."""
        return self._batch.rows

    @property
    def sharing(self) -> str:
        """Whether these share each pass, in words."""
        rows = self._batch.rows
        if not isinstance(self._batch, RoundRobin):
            return f"up to {rows} requests share each pass"
        reason = self._why_turns
        turns = f"{rows} requests take turns" if rows > 1 else "one request at a time"
        return f"{turns}: {reason}" if reason else turns

    def receipt(self) -> dict[str, object]:
        """Return how many requests are answered at a time, and the bytes that keys and values and
        kept prompts may take where they share passes."""
        said = {"rows": self._batch.rows}
        if isinstance(self._batch, RoundRobin):
            return said
        most_kept = self._batch.kept.most_nbytes
        return said | {"cache_room_bytes": self._batch.room, "kept_prompts_bytes": most_kept}

    @property
    def cached_nbytes(self) -> int:
        """Bytes of the keys, values and states of running requests."""
        return self._batch.cached_nbytes

    @property
    def num_free(self) -> int:
        """Requests that can begin."""
        return self._batch.rows - len(self._active)

    def begin(self, job: GenerationJob) -> None:
        try:
            active = ActiveRequest(job, self._session, self._tally, preset=self._preset)
            own = {"owner": job.owner, "most_drafts": job.most_drafts}
            number = self._batch.add(job.encoded.ids, job.encoded.sampling, **own)
        except Exception as error:
            self._over("failed")
            job.tell(failed(error))
        else:
            self._active[number] = active
            self._tally.waited.observe(active.waited_s)

    def step(self) -> None:
        """Drop the requests whose clients have left, and run a pass for others."""
        for number in [number for number, active in self._active.items() if active.job.has_left]:
            self._remove(number, "left")
        if results := self._batch.step():
            self._tally.count(results, tuple(self._session.engine.steps.last_token.values()))
        for result in results:
            self._take(result)

    def break_off(self, why: Failed) -> None:
        """End every request."""
        for number, active in list(self._active.items()):
            self._remove(number, "failed")
            active.job.tell(why)

    def close(self) -> None:
        """Give the session back."""
        self._batch.close()

    def _take(self, result: RowResult) -> None:
        """Hand a request what a pass gave it; an error ends that request only. Tokens behind one
        that ended it are dropped."""
        active = self._active.get(result.request)
        if active is None:
            return
        if result.error is not None:
            self._fail(result.request, result.error)
            return
        try:
            active.take(result)
        except Exception as error:
            self._fail(result.request, error)
        else:
            if active.done:
                # before the client is told: it may read the counters at once
                self._remove(result.request, "answered")
                active.job.tell(active.done)

    def _fail(self, number: int, error: Exception) -> None:
        job = self._active[number].job
        self._remove(number, "failed")
        job.tell(failed(error))

    def _remove(self, number: int, outcome: str) -> None:
        self._batch.cancel(number)
        del self._active[number]
        self._over(outcome)


def failed(error: BaseException) -> Failed:
    """Return the failure that a client is told: the message of a Problem, with status 400 if the
    options of the request leave no token; for any other error its type, and the error is logged."""
    is_ours = isinstance(error, Problem)
    if not is_ours:
        _log.error("a request failed", exc_info=error)
    told = str(error) if is_ours else f"internal error: {type(error).__name__}"
    return Failed(told, 400 if isinstance(error, NoToken) else 500)


class ActiveRequest:
    """One of them: its text, and its counters and times. Call `take` with what each pass gave it
    until `done` is set; pieces of the reply go to the job as its text is decoded. `preset` is the
    one in force."""

    def __init__(self, job: GenerationJob, session: Session, tally: Tally, *, preset: str) -> None:
        opened = session.opened
        self.job = job
        self.done: Done | None = None
        self._tally = tally
        self._preset = preset
        self._form = job.encoded.form
        self._text = Detokeniser(opened.tokenizer, keeps=self._form.markers)
        self._parser = self._form.parser()
        self._stops = Stops(job.stops)
        self._log = _TokenLog(session.grammars.bytes_of)
        self._told: list[Piece] = []  # in the present pass
        self._num_calls = 0
        self._num_reasoning = 0
        self._num_unplaced = 0  # tokens of which no piece is known yet
        self._ends = _end_tokens(opened.model.generation_config.eos_token_id)
        self.waited_s = time.perf_counter() - job.arrived_s
        self._ids: list[int] = []
        self._timing = TokenTiming()
        self._charge = Charge()
        self._untold = Charge()  # since the last token, where costs are told by token
        self._num_passes = 0

    def take(self, result: RowResult) -> None:
        """Take what a pass gave a request that no error has ended."""
        self._charge += result.charge
        self._num_passes += bool(result.charge.passes)
        if result.token_id is not None:
            self._add(result.token_id, result.num_reused, result.logprobs)
        if self._is_enough:
            self._end("stop", result.num_reused)
        elif result.is_over:
            self._finish(result)
        for event in (*self._log.release(self._stops.num_held), *self._told):
            self.job.tell(event)
        self._told.clear()
        if self.job.by_token:
            self._tell_cost(result)

    def _add(self, token_id: int, num_cached: int, logprobs: Logprobs | None) -> None:
        self._ids.append(token_id)
        self._clock(num_cached)
        text = self._text.add(token_id)
        self._log.add(token_id, logprobs, len(text))
        pieces = self._parser.add(text)
        self._num_unplaced += 1
        if pieces:
            is_reasoning = isinstance(pieces[-1], ReasoningPiece)
            self._num_reasoning += self._num_unplaced * is_reasoning
            self._num_unplaced = 0
        self._tell(pieces)

    def _clock(self, num_cached: int) -> None:
        """Note when the latest token came, and tell the tally."""
        seconds = self._timing.seconds
        seconds.append(time.perf_counter() - self.job.arrived_s)
        if len(seconds) == 1:
            num_prompt_tokens = self.job.encoded.ids.shape[1]
            self._tally.first(self.job.owner, num_prompt_tokens, seconds[0], num_cached=num_cached)
        else:
            self._tally.per_token.observe(seconds[-1] - seconds[-2])

    @property
    def _is_enough(self) -> bool:
        most = self._form.max_calls
        return self._stops.is_met or (most is not None and self._num_calls > most)

    def _finish(self, result: RowResult) -> None:
        text = self._text.rest()
        self._log.grow(len(text))
        self._tell([*self._parser.add(text), *self._parser.rest()])
        if not self._is_enough:
            self._tell_text(self._stops.rest())
        # The model's generation settings may end a text otherwise, by `stop_strings` for one.
        is_stopped = self._is_enough or len(self._ids) < self.job.encoded.sampling.max_new_tokens
        is_stopped |= bool(self._ids) and self._ids[-1] in self._ends
        is_stopped |= result.is_complete
        self._end("stop" if is_stopped else "length", result.num_reused)

    def _tell(self, pieces: list[Piece]) -> None:
        """Tell the client, up to the first stop in the text or one call too many."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                self._tell_text(self._stops.add(piece.text))
            else:
                self._tell_text(self._stops.rest())
                self._num_calls += isinstance(piece, CallPiece)
            if self._is_enough:
                return
            if not isinstance(piece, TextPiece):
                self._told.append(piece)

    def _tell_cost(self, result: RowResult) -> None:
        self._untold += result.charge
        if result.token_id is not None:
            self.job.tell(TokenCost.of(result.token_id, self._untold))
            self._untold = Charge()

    def _tell_text(self, text: str) -> None:
        if text:
            self._told.append(TextPiece(text))

    def _end(self, reason: str, num_cached: int) -> None:
        if reason == "stop" and self._num_calls:
            reason = "tool_calls"
        self._tally.took.observe(time.perf_counter() - self.job.arrived_s)
        self.done = Done(
            reason,
            len(self._ids),
            self._took(),
            num_cached,
            self._stops.met,
            self._num_reasoning,
            int(self._charge.counters[Counter.DRAFTED].sum()),
            int(self._charge.counters[Counter.ACCEPTED].sum()),
        )

    def _took(self) -> dict[str, object]:
        layers = by_layer(self._charge.counters)
        line = in_a_line_of_many(
            len(self._ids), self._timing, self._charge, num_passes=self._num_passes
        )
        return {
            "line": line,
            "preset": self._preset,
            "token_ids": self._ids,
            "counters": totals(layers) | {"exposed_ms": self._charge.exposed_s * 1e3},
            "by_layer": layers,
            "passes": self._num_passes,
            "share_of_passes": self._charge.passes / self._num_passes,
            "busy_ms": self._charge.seconds * 1e3,
            "waited_ms": self.waited_s * 1e3,
            "ttft_ms": self._timing.ttft_ms,
            "tpot_ms": self._timing.tpot_ms,
        }


class _TokenLog:
    """Tokens that were drawn, with their log probabilities, until their text is passed on."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._num_characters = 0  # of all text so far
        self._held: deque[tuple[int, LoggedToken]] = (
            deque()
        )  # by the character with which it begins

    def add(self, token_id: int, logprobs: Logprobs | None, num_characters: int) -> None:
        """Take a token that completed some characters."""
        if logprobs is not None:
            top = tuple((self._bytes_of(one), value) for one, value in logprobs.top)
            token = LoggedToken(self._bytes_of(token_id), logprobs.chosen, top)
            self._held.append((self._num_characters, token))
        self.grow(num_characters)

    def grow(self, num_characters: int) -> None:
        """Count characters that no further token completed."""
        self._num_characters += num_characters

    def release(self, num_held: int) -> Iterator[LoggedTokens]:
        """Yield the tokens of the text before the last `num_held` characters, if there are any;
        an end without text has none."""
        passed = []
        while self._held and self._held[0][0] < self._num_characters - num_held:
            passed.append(self._held.popleft()[1])
        if passed:
            yield LoggedTokens(tuple(passed))


def _end_tokens(ids: int | list[int] | None) -> set[int]:
    return set(ids) if isinstance(ids, list) else {ids} - {None}

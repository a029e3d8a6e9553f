"""The requests that are being answered, on one session: each pass gives some of them a token."""

import logging
from collections.abc import Callable

from artifacts.errors import Problem
from moectl.serving.active_request import ActiveRequest
from moectl.serving.guard import ServerLimits
from moectl.serving.jobs import Failed, GenerationJob
from moectl.serving.tally import Tally
from moectl.shared.batch_size import batch_size
from runtime.session.generation.batch import KeptPrompts, RowResult
from runtime.session.generation.round_robin import RoundRobin, open_batch
from runtime.session.session import Session

TILE = 512  # tokens of prompts in a pass, for which the other requests wait

_log = logging.getLogger("moectl")


class RunningRequests:
    """Owns the session's passes until `close`. One thread calls it; `over` is told how each request
    ended, once its row is free."""

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
        if limits.shares_passes:
            room = batch_size(session, limits.num_rows).room
            own = {"tile": TILE, "room": room, "kept_nbytes": limits.kept_nbytes}
            self._batch = open_batch(session, rows=limits.num_rows, **own)
        else:
            self._batch = RoundRobin(session, rows=limits.num_rows)

    def __len__(self) -> int:
        return len(self._active)

    @property
    def kept(self) -> KeptPrompts:
        """Bytes of the prompts that are kept for their beginnings, and the bytes that they may
        take."""
        return self._batch.kept

    @property
    def num_free(self) -> int:
        """Requests that can begin."""
        return self._batch.rows - len(self._active)

    def begin(self, job: GenerationJob) -> None:
        try:
            active = ActiveRequest(job, self._session.opened, self._tally, preset=self._preset)
            number = self._batch.add(job.encoded.ids, job.encoded.sampling, owner=job.owner)
        except Exception as error:
            self._over("failed")
            job.tell(failed(error))
        else:
            self._active[number] = active

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
        """Hand a request what a pass gave it; an error ends that request only."""
        active = self._active[result.request]
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
    """Return the failure that a client is told: the message of a Problem; for any other error its
    type, and the error is logged."""
    is_ours = isinstance(error, Problem)
    if not is_ours:
        _log.error("a request failed", exc_info=error)
    return Failed(str(error) if is_ours else f"internal error: {type(error).__name__}", 500)

"""Who runs next: one thread owns the session, takes requests in the order they came, and gives each its turns."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from artifacts.errors import Problem
from moectl.serving.guard import ServerLimits
from moectl.serving.jobs import Failed, Job, Switch
from moectl.serving.row import Row
from moectl.serving.tally import Tally
from runtime.session.interleave import Interleave
from runtime.session.session import Session

# Passes of a request before the next one's turn: more cost others time, fewer cost hits, since at each change another's
# experts push out some of its own (docs/decisions.md has the figures).
PASSES = 4

_log = logging.getLogger("moectl")


class Full(Exception):
    """As many requests as the limits allow are here already."""


class Closing(Exception):
    """The server takes no more requests."""


class Scheduler:
    """`build` makes a session run by a preset; there is one at a time, and no other thread runs its model."""

    def __init__(self, build: Callable[[str], Session], preset: str, limits: ServerLimits) -> None:
        self.preset, self.limits = preset, limits
        self.session: Session
        self.receipt: dict[str, object]
        self.tally: Tally
        self._build = build
        self._rows: list[Row] = []
        self._waiting: deque[Job | Switch] = deque()
        self._num_taken = 0  # requests that are waiting or under way
        self._is_closing = False
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="moectl-serve", daemon=True)

    # On any thread

    def start(self) -> None:
        """Until the session is there. Raises what stands in its way."""
        self._thread.start()
        self._ready.result()

    def close(self) -> None:
        """Nothing more is answered, what is under way is broken off, and the session is closed."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return max(0, self._num_taken - len(self._rows))

    def submit(self, job: Job) -> None:
        """Raises Full or Closing."""
        with self._changed:
            self._check_open()
            if self._num_taken >= self.limits.num_rows + self.limits.num_waiting:
                self.tally.end("refused")
                raise Full
            self._num_taken += 1
            self._waiting.append(job)
            self._changed.notify()

    def switch(self, preset: str) -> Switch:
        """Takes its turn as a request does. Raises Closing."""
        switch = Switch(preset)
        with self._changed:
            self._check_open()
            self._waiting.append(switch)
            self._changed.notify()
        return switch

    def leave(self, job: Job) -> None:
        """Nobody waits for the answer any more, if it was not there already: a row is free after the pass under way, a
        place in the queue at once."""
        with self._changed:
            job.has_left = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._over("left")

    def _check_open(self) -> None:
        if not self.is_alive:
            raise Closing

    def _over(self, outcome: str) -> None:
        self._num_taken -= 1
        self.tally.end(outcome)

    # On the thread that runs the model

    def _run(self) -> None:
        try:
            self._open(self.preset)
            self.tally = Tally(self.session.opened.shape.num_layers)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._round():
                pass
        except Exception:
            _log.exception("the server cannot go on")
        finally:
            self._end()

    def _open(self, preset: str) -> None:
        self.session = self._build(preset)
        self._interleave = Interleave(self.session)
        self.preset, self.receipt = preset, self.session.receipt()
        # Where a prompt says what stays resident, the next one would say otherwise in the midst of its answer.
        self._room = 1 if self.session.policies.residency.places else self.limits.num_rows

    def _shut(self) -> None:
        self._interleave.close()
        self.session.close()

    def _round(self) -> bool:
        """A turn of everybody; False once there are to be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._waiting or self._is_closing)
            if self._is_closing:
                return False
            coming = self._coming()
        for one in coming:
            if isinstance(one, Switch):
                self._switch(one)
            else:
                self._begin(one)
        for row in list(self._rows):
            self._turns(row)
        return True

    def _coming(self) -> list[Job | Switch]:
        """Who begins now: the first in the queue, as far as there is room. A switch wants the model for itself."""
        coming: list[Job | Switch] = []
        while self._waiting and len(self._rows) + len(coming) < self._room:
            if isinstance(self._waiting[0], Switch):
                return coming or ([] if self._rows else [self._waiting.popleft()])
            coming.append(self._waiting.popleft())
        return coming

    def _begin(self, job: Job) -> None:
        try:
            self._rows.append(Row(job, self._interleave, self.tally, preset=self.preset))
        except Exception as error:
            self._over("failed")
            _tell_of(error, job)

    def _turns(self, row: Row) -> None:
        """Some passes of one request; whatever it fails of is its own affair."""
        try:
            for _ in range(PASSES):
                if row.job.has_left:
                    self._remove(row, "left")
                    return
                row.step()
                if row.done:
                    self._remove(row, "answered")  # before the client hears of it: it may ask at once what was counted
                    row.job.tell(row.done)
                    return
        except Exception as error:
            self._remove(row, "failed")
            _tell_of(error, row.job)

    def _remove(self, row: Row, outcome: str) -> None:
        row.close()
        with self._changed:
            self._rows.remove(row)
            self._over(outcome)

    def _switch(self, switch: Switch) -> None:
        """Build anew; what cannot be leaves the preset as it was, with an empty fast tier."""
        if not switch.settled.set_running_or_notify_cancel():  # nobody waits for it
            return
        before = self.preset
        self._shut()
        try:
            self._open(switch.preset)
        except Exception as error:
            self._open(before)
            switch.settled.set_exception(error)
        else:
            switch.settled.set_result(None)

    def _end(self) -> None:
        """Whoever is still here is told so."""
        with self._changed:
            self._is_closing = True
            waiting, rows = list(self._waiting), list(self._rows)
            self._waiting.clear()
        for row in rows:
            self._remove(row, "failed")
            row.job.tell(Failed("the server is stopping", 503))
        for one in waiting:
            if isinstance(one, Job):
                self._over("failed")
                one.tell(Failed("the server is stopping", 503))
            elif one.settled.set_running_or_notify_cancel():
                one.settled.set_exception(Closing())
        self._shut()


def _tell_of(error: Exception, job: Job) -> None:
    """What a user can mend in our words, the rest by its name and whole in the log."""
    is_ours = isinstance(error, Problem)
    if not is_ours:
        _log.error("a request failed", exc_info=error)
    job.tell(Failed(str(error) if is_ours else f"internal error: {type(error).__name__}", 500))

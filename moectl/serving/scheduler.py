"""The scheduler takes requests in order of arrival: one thread encodes their prompts, another one
owns the session and runs their passes."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch

from artifacts.errors import Problem, detached
from moectl.serving.guard import ServerLimits
from moectl.serving.jobs import Encoded, Failed, GenerationJob, Switch
from moectl.serving.running import RunningRequests, failed
from moectl.serving.tally import Tally
from runtime.session.generation.batch import KeptPrompts
from runtime.session.generation.sampling import TooLong, check_prompt, num_positions
from runtime.session.prompts.encoder import EncodedPrompt
from runtime.session.session import Session

T = TypeVar("T")
_ENDLESS = 1 << 15  # tokens of an answer that nothing bounds
_log = logging.getLogger("moectl")


class Full(Exception):
    """The queue is full."""


class Closing(Exception):
    """The server takes no more requests."""


class Scheduler:
    """Runs requests on one session. `build` makes a session for a preset; only one thread runs its
    model.

    A prompt is encoded while its request waits, one at a time, so that requests under way go on
    meanwhile and a client that leaves costs nothing more.
    """

    def __init__(self, build: Callable[[str], Session], preset: str, limits: ServerLimits) -> None:
        self.preset = preset
        self.limits = limits
        self.session: Session
        self.receipt: dict[str, object]
        self.tally: Tally
        self._build = build
        self._running: RunningRequests
        self._waiting: deque[GenerationJob | Switch] = deque()
        self._num_taken = 0  # waiting and running requests
        self._is_closing = False
        self._changed = threading.Condition()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="moectl-serve", daemon=True)
        self._encoder = threading.Thread(
            target=self._encode_waiting, name="moectl-encode", daemon=True
        )
        # held while a prompt is encoded, and while the session is replaced
        self._encoding = threading.Lock()

    # Called on any thread

    def start(self) -> None:
        """Start the thread and wait for the session. Raises the error that prevents it."""
        self._thread.start()
        self._ready.result()
        self._encoder.start()

    def close(self) -> None:
        """Break off running requests, refuse waiting ones and close the session."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._encoder.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    @property
    def num_rows(self) -> int:
        """Requests that are answered at a time."""
        return self._running.num_rows

    @property
    def sharing(self) -> str:
        """Whether these requests share each pass, in words."""
        return self._running.sharing

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def kept(self) -> KeptPrompts:
        """Bytes of the prompts that are kept for their beginnings, and the bytes that they may
        take."""
        return self._running.kept

    @property
    def cached_nbytes(self) -> int:
        """Bytes of the keys, values and states of running requests."""
        return self._running.cached_nbytes

    @property
    def num_waiting(self) -> int:
        return max(0, self._num_taken - len(self._running))

    @property
    def num_positions(self) -> int | None:
        """The most tokens that a prompt and its answer may have together: the model's, or fewer by
        the limits; None where neither says."""
        given = (num_positions(self.session.opened.model), self.limits.num_positions)
        return min((one for one in given if one), default=None)

    def with_session(self, ask: Callable[[Session], T]) -> T:
        """Return what `ask` makes of the session, which is not replaced meanwhile, nor encodes
        another prompt."""
        with self._encoding:
            return ask(self.session)

    def submit(self, job: GenerationJob) -> None:
        """Queue a job. Raises Full or Closing."""
        with self._changed:
            self._check_open()
            if self._num_taken >= self.num_rows + self.limits.num_waiting:
                self.tally.end("refused")
                raise Full
            self._num_taken += 1
            self._waiting.append(job)
            self._changed.notify_all()

    def switch(self, preset: str) -> Switch:
        """Queue a switch of the preset. Raises Closing."""
        switch = Switch(preset)
        with self._changed:
            self._check_open()
            self._waiting.append(switch)
            self._changed.notify_all()
        return switch

    def leave(self, job: GenerationJob) -> None:
        """Drop a job whose client has disconnected; no effect on a finished one.

        A waiting job is removed at once, a running one after the present pass.
        """
        with self._changed:
            job.has_left = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._over("left")

    def _check_open(self) -> None:
        if not self.is_alive:
            raise Closing

    def _over(self, outcome: str) -> None:
        with self._changed:
            self._num_taken -= 1
            self.tally.end(outcome)

    # Called on the scheduler's thread

    def _run(self) -> None:
        try:
            session = self._build(self.preset)
            self.tally = Tally(session.opened.shape.num_layers)
            self._use(session, self.preset)
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

    def _use(self, session: Session, preset: str) -> None:
        self.session = session
        self._running = RunningRequests(
            session, self.limits, self.tally, preset=preset, over=self._over
        )
        self.preset = preset
        self.receipt = session.receipt() | {"requests": self._running.receipt()}

    def _shut(self) -> None:
        self._running.close()
        self.session.close()

    def _round(self) -> bool:
        """Begin what has come, and run one pass; False once the scheduler is closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._running) or self._has_ready or self._is_closing
            )
            if self._is_closing:
                return False
            coming = self._coming()
        for one in coming:
            if isinstance(one, Switch):
                self._switch(one)
            else:
                self._running.begin(one)
        self._running.step()
        return True

    def _coming(self) -> list[GenerationJob | Switch]:
        """Take from the queue what can start now. A switch starts only when no request is
        running."""
        coming: list[GenerationJob | Switch] = []
        while self._has_ready and len(coming) < self._running.num_free:
            if isinstance(self._waiting[0], Switch):
                return coming or ([] if len(self._running) else [self._waiting.popleft()])
            coming.append(self._waiting.popleft())
        return coming

    @property
    def _has_ready(self) -> bool:
        return bool(self._waiting) and self._waiting[0].is_ready

    def _switch(self, switch: Switch) -> None:
        """Build a session for another preset; on an error rebuild the former one, with an empty
        fast tier."""
        if not switch.settled.set_running_or_notify_cancel():  # cancelled
            return
        before = self.preset
        with self._encoding:
            self._shut()
            try:
                self._use(self._build(switch.preset), switch.preset)
            except Exception as error:
                detached(error)  # from what was built so far
                try:
                    self._use(self._build(before), before)
                finally:
                    switch.settled.set_exception(error)
            else:
                switch.settled.set_result(None)

    def _end(self) -> None:
        """Fail the remaining requests and switches, and close the session."""
        with self._changed:
            self._is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        stopping = Failed("the server is stopping", 503)
        self._running.break_off(stopping)
        for one in waiting:
            if isinstance(one, GenerationJob):
                self._over("failed")
                one.tell(stopping)
            elif one.settled.set_running_or_notify_cancel():
                one.settled.set_exception(Closing())
        with self._encoding:
            self._shut()

    # Called on the encoder's thread

    def _encode_waiting(self) -> None:
        while job := self._to_encode():
            with self._encoding:
                found = _encoded(job, self.session, self.num_positions, self._running.unasked)
            job.tell(found)
            with self._changed:
                if isinstance(found, Encoded):
                    job.encoded = found
                elif job in self._waiting:
                    self._waiting.remove(job)
                    self._over("failed")
                self._changed.notify_all()

    def _to_encode(self) -> GenerationJob | None:
        """Wait for a prompt that is not encoded yet, and return the first; None once the scheduler
        is closing."""

        def first() -> GenerationJob | None:
            return next((one for one in self._waiting if not one.is_ready), None)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or first())
            return None if self._is_closing else first()


def _encoded(
    job: GenerationJob, session: Session, longest: int | None, unasked: int | None
) -> Encoded | Failed:
    """Encode the prompt of a job, and count the tokens that its answer may have: as many as are
    requested, else as fit into `longest` positions, at most `unasked`. Failed for a prompt that the
    tokenizer, its template or the model cannot take."""
    if job.like and job.like.encoded:
        seed = job.sampling.seed
        return replace(job.like.encoded, sampling=replace(job.like.encoded.sampling, seed=seed))
    try:
        is_encoded = isinstance(job.prompt, torch.Tensor)
        prompt = EncodedPrompt(job.prompt) if is_encoded else session.prompts.encode(job.prompt)
        ids = prompt.ids
        model = session.opened.model
        least = 1 if job.may_be_less else job.max_tokens or 1
        num_prompt = ids.shape[1]
        check_prompt(model, ids, least)
        if longest and num_prompt + least > longest:
            raise TooLong(
                f"{num_prompt} prompt tokens and {least} new ones exceed the {longest} positions "
                "that are served: give fewer, or start the server with a larger --ctx-size"
            )
        room = [longest - num_prompt] if longest else []
        num_new = min([*room, job.max_tokens or unasked or _ENDLESS])
        session.prepare(job.sampling)
        sampling = replace(job.sampling, max_new_tokens=num_new, thoughts=prompt.thoughts)
        return Encoded(ids, sampling, prompt.form)
    except Problem as problem:
        return Failed(str(problem), 400, code_of(problem))
    except (ValueError, OverflowError) as error:
        return Failed(f"the prompt cannot be encoded: {error}", 400)
    except BaseException as error:  # also a panic of the tokenizer, which is no Exception
        return failed(error)


def code_of(problem: Problem) -> str | None:
    """The code of an error in OpenAI's API, where it has one."""
    return "context_length_exceeded" if isinstance(problem, TooLong) else None

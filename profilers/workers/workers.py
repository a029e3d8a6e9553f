"""A few workers that each do one task after another: processes of this machine, or whatever else an executor starts.

Processes die with the one that made them, and it hears of theirs.
"""

import signal
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from types import TracebackType
from typing import Protocol

import torch

from artifacts.errors import OutOfResources, Problem
from profilers.workers.memory import return_large_buffers

Work = Callable[[object], object]
Lost = dict[Hashable, Exception]

ATTEMPTS = 3  # at a task that takes its worker with it


class Worker(Protocol):
    """Who does one task at a time; `name` is that of the last one it was sent."""

    name: Hashable

    def send(self, task: object, name: Hashable) -> None:
        """Begin a task, and do not wait for it."""

    def outcome(self) -> tuple[bool, object]:
        """Wait for what `outcome` below gave. Raises OutOfResources when the worker is gone."""

    def end(self) -> None:
        """Ask nothing more of it, in the midst of a task too."""


class Executor(Protocol):
    """Where workers are: `count` of them at a time. `is_here`: in this process, one task after another."""

    count: int
    is_here: bool

    def start(self, work: Work) -> Worker:
        """One more worker."""

    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Wait until some of these have an outcome, and give those."""


class Workers:
    """A context manager; `submit` waits while all are busy, and `done` hears every result, in the order of arrival.

    Every worker but this process computes on one torch thread: two that wait for each other on a busy machine cost many
    times the work. Leaving on an error ends the workers in the midst of their tasks.

    A task that takes its worker with it, or raises what is no Problem, is lost: others go on, and `finish` says which.
    """

    def __init__(self, work: Work, executor: Executor, done: Callable[[object], None]) -> None:
        self._work, self._executor, self._done = work, executor, done
        self._free: list[Worker] = []
        self._busy: list[Worker] = []
        self._lost: Lost = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._free + self._busy:
            worker.end()

    def submit(self, task: object, name: Hashable = None) -> None:
        """Have a task done; `name` is for what is lost. Raises the Problem of an earlier one."""
        if self._executor.is_here:
            self._done(self._work(task))
            return
        while not self._free:
            if len(self._busy) < self._executor.count:
                self._free.append(self._executor.start(self._work))
            else:
                self._collect()
        worker = self._free.pop()
        self._busy.append(worker)
        worker.send(task, name)

    def finish(self) -> Lost:
        """Wait for all tasks, and give those lost since it was last asked: OutOfResources for a worker that was killed,
        RuntimeError with the traceback for a bug. Raises as `submit`."""
        while self._busy:
            self._collect()
        lost, self._lost = self._lost, {}
        return lost

    def persist(self, again: Callable[[Hashable], None]) -> Lost:
        """As `finish`, but what is lost is tried again first, `ATTEMPTS` times in all: memory was short for a moment,
        perhaps. `again` submits it anew, by its name."""
        lost = self.finish()
        for _ in range(ATTEMPTS - 1):
            for name in lost:
                again(name)
            lost = self.finish()
        return lost

    def _collect(self) -> None:
        for worker in self._executor.ready(self._busy):
            self._busy.remove(worker)
            try:
                is_done, value = worker.outcome()
            except OutOfResources as killed:
                worker.end()
                self._lost[worker.name] = killed
                continue
            self._free.append(worker)
            if is_done:
                self._done(value)
            elif isinstance(value, Problem):
                raise value
            else:
                self._lost[worker.name] = RuntimeError(f"in a worker process:\n{value}")


class Processes:
    """An executor: `count` processes of this machine; a single one is this one."""

    def __init__(self, count: int) -> None:
        self.count, self.is_here = count, count == 1

    def start(self, work: Work) -> "Process":
        return Process(work)

    def ready(self, busy: Sequence["Process"]) -> list["Process"]:
        ready = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in ready]


class Process:
    """A worker that is a process of this machine."""

    def __init__(self, work: Work) -> None:
        context = get_context("spawn")  # a fork would copy torch's threads in whatever state they are
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with _interrupts_held():
            self.process.start()
        theirs.close()  # or nobody would notice when the worker is gone

    def send(self, task: object, name: Hashable) -> None:
        self.name = name
        with suppress(ConnectionError):  # it was killed as it waited; `outcome` says so
            self.connection.send(task)

    def outcome(self) -> tuple[bool, object]:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join()
            raise OutOfResources(
                f"a worker process ended (code {self.process.exitcode}), most likely for lack of memory: give fewer "
                "--jobs; the same command goes on where it stopped"
            ) from error

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits, and a process started meanwhile is deaf to it: it would else fall over while it still imports."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    ensure_running()  # multiprocessing's tracker starts with the first worker, and lets interrupts in again as it does
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, work: Work) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; whoever made us ends us
    torch.set_num_threads(1)
    return_large_buffers()
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(outcome(work, task))


def outcome(work: Work, task: object) -> tuple[bool, object]:
    """Whether a task was done, and its result; else the Problem, or the traceback of a bug."""
    try:
        return True, work(task)
    except Problem as problem:
        return False, problem
    except Exception:  # a bug: the caller raises it with where it was
        return False, traceback.format_exc()

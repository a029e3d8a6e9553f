"""Distributes tasks to workers: processes of this machine, or workers of another executor.

A worker process ends with the process that started it. When a worker process dies, the process that
started it is told.
"""

import ctypes
import signal
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from types import TracebackType
from typing import Protocol

import torch

from artifacts.errors import OutOfResources, Problem

Work = Callable[[object], object]
Lost = dict[Hashable, Exception]

ATTEMPTS = 3  # at a task that fails or kills its worker
_M_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt
_LARGE_NBYTES = 1 << 20


class Worker(Protocol):
    """Does one task at a time; `name` is the name of the task it was last sent."""

    name: Hashable

    def send(self, task: object, name: Hashable) -> None:
        """Begin a task without waiting for it."""

    def outcome(self) -> tuple[bool, object]:
        """Wait for the result of `outcome` below. Raises OutOfResources when the worker has
        died."""

    def end(self) -> None:
        """End the worker, even during a task."""


class Executor(Protocol):
    """Starts up to `count` workers, `most_together` of them on one machine. With `is_here` tasks
    run in this process instead, one after another."""

    count: int
    most_together: int
    is_here: bool

    def start(self, work: Work) -> Worker:
        """Start one more worker."""

    def ready(self, busy: Sequence[Worker]) -> Sequence[Worker]:
        """Wait until some of these workers have an outcome, and return those."""


class Workers:
    """A context manager; `submit` waits while all workers are busy, and `done` is called with every
    result as it arrives.

    Worker processes compute on one torch thread each: threads that wait for each other on a busy
    machine cost many times the work. Leaving the context on an error ends the workers during their
    tasks.

    A task that kills its worker, or raises an exception other than a Problem, is lost: the others
    continue, and `finish` returns the lost ones.
    """

    def __init__(self, work: Work, executor: Executor, done: Callable[[object], None]) -> None:
        self._work = work
        self._executor = executor
        self._done = done
        self._free: list[Worker] = []
        self._busy: list[Worker] = []
        self._lost: Lost = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._free + self._busy:
            worker.end()

    def submit(self, task: object, name: Hashable = None) -> None:
        """Give a task to a worker; `name` identifies it if it is lost. Raises the Problem of an
        earlier task."""
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
        """Wait for all tasks and return those lost since the last call: OutOfResources for a worker
        that was killed, RuntimeError with the traceback for a bug. Raises as `submit`."""
        while self._busy:
            self._collect()
        lost = self._lost
        self._lost = {}
        return lost

    def persist(self, again: Callable[[Hashable], None]) -> Lost:
        """Wait for all tasks as `finish` does, but try lost tasks again first, `ATTEMPTS` times in
        all, since memory may have been short only for a moment. `again` submits the task of a
        name."""
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


def listed_losses(lost: Lost, of: str, done: str, names: Iterable[str]) -> str:
    """Return what to say of lost tasks: their `names`, `of` how many tasks of which kind, and the
    verb for what could not be `done`."""
    reason = str(next(iter(lost.values()))).strip().splitlines()[-1]
    return (
        f"{len(lost)} of {of} were tried {ATTEMPTS} times and could not be {done}: "
        f"{', '.join(names)}; all others are kept, and the same command tries these again. Of the "
        f"first: {reason}"
    )


def return_large_buffers() -> None:
    """Make the C library return large buffers to the operating system as soon as they are freed.

    By default glibc keeps what a thread has freed for that thread alone. With a thread per batch
    the process would hold several times the memory in use. Other C libraries have no such setting
    and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)


class Processes:
    """An executor of `count` processes of this machine; with a count of 1 it is the current
    process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.most_together = count
        self.is_here = count == 1

    def start(self, work: Work) -> "Process":
        return Process(work)

    def ready(self, busy: Sequence["Process"]) -> list["Process"]:
        ready = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in ready]


class Process:
    """A worker that is a process of this machine."""

    def __init__(self, work: Work) -> None:
        context = get_context("spawn")  # a fork would copy torch's threads in an undefined state
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with _interrupts_held():
            self.process.start()
        theirs.close()  # otherwise the end of the worker would not close the connection

    def send(self, task: object, name: Hashable) -> None:
        self.name = name
        # the worker was killed while it waited; `outcome` raises that
        with suppress(ConnectionError):
            self.connection.send(task)

    def outcome(self) -> tuple[bool, object]:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join()
            raise OutOfResources(
                f"a worker process ended (code {self.process.exitcode}), most likely for lack of "
                "memory: give fewer --jobs; the same command goes on where it stopped"
            ) from error

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back. A process started meanwhile ignores it; otherwise the process could fail
    during its imports."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # starting multiprocessing's tracker unblocks interrupts, so it must start before they are
    # blocked
    ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, work: Work) -> None:
    # Ctrl-C reaches the whole group; the parent ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    return_large_buffers()
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(outcome(work, task))


def outcome(work: Work, task: object) -> tuple[bool, object]:
    """Do a task. Returns True and its result, or False and the Problem, or False and the traceback
    of a bug."""
    try:
        return True, work(task)
    except Problem as problem:
        return False, problem
    except Exception:  # a bug: the parent process raises it with this traceback
        return False, traceback.format_exc()

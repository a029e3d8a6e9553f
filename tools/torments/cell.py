"""A torment in a process of its own: a crash, a hang or too much memory ends that process and is
reported."""

import multiprocessing
import os
import random
import resource
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tools.torments import cases

SLOWEST_S = 300.0  # for one case, or for the preparation


@dataclass(frozen=True, slots=True)
class Case:
    """`loss` is empty if every promise held; `peak_nbytes` is the peak of the process so far."""

    number: int
    fault: str
    loss: str
    seconds: float
    peak_nbytes: int


class Cell:
    """Starts its process with the first case, and anew after a case that ended it."""

    def __init__(self, torment: type[cases.Torment], ground: Path, seed: int) -> None:
        self._torment = torment
        self._ground = ground
        self._seed = seed
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._starts = 0

    def run(self, number: int) -> Case:
        began = time.monotonic()
        try:
            if self._process is None:
                self._start()
            fault, loss, peak_nbytes = self._asked(number)
        except cases.Lost as problem:
            self.close()
            fault = "ended"
            loss = str(problem)
            peak_nbytes = 0
        return Case(number, fault, loss, time.monotonic() - began, peak_nbytes)

    def close(self) -> None:
        """End the process and everything that the torment has started."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        self._starts += 1
        ground = self._ground / f"{self._torment.__name__.lower()}-{self._starts}"
        ground.mkdir()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_cell, args=(theirs, self._torment, ground, self._seed)
        )
        self._process.start()
        theirs.close()
        if problem := self._answer():
            raise cases.Lost(problem)

    def _asked(self, number: int) -> tuple[str, str, int]:
        self._pipe.send(number)
        return self._answer()

    def _answer(self) -> tuple[str, str, int] | str:
        try:
            if not self._pipe.poll(SLOWEST_S):
                raise cases.Lost(f"no end within {SLOWEST_S:.0f} s")
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise cases.Lost(f"its process ended with {self._process.exitcode}") from None


def _cell(pipe: Connection, torment: type[cases.Torment], ground: Path, seed: int) -> None:
    """Answer once after the preparation, with its error if any, then with fault, loss and peak for
    each number."""
    os.setsid()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it is first imported
    try:
        prepared = torment(ground)
    except Exception:
        pipe.send(f"not prepared: {traceback.format_exc(limit=-3)}")
        return
    pipe.send("")
    with suppress(EOFError, BrokenPipeError):  # the parent process has ended
        while True:
            number = pipe.recv()
            fault, loss = _case(prepared, random.Random(f"{seed} {torment.__name__} {number}"))
            pipe.send((fault, loss, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _case(torment: cases.Torment, rng: random.Random) -> tuple[str, str]:
    try:
        return torment.one(rng), ""
    except cases.Lost as problem:
        return "lost", str(problem)
    except BaseException as problem:
        where = traceback.format_exc(limit=-2).strip().replace("\n", " | ")
        return "lost", f"{type(problem).__name__}: {where}"

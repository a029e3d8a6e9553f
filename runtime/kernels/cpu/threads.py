"""Threads that compute parts of a token's work side by side: kernels that release the GIL, each for
rows of its own. The sum of a row does not depend on how the work was divided: every number of
threads gives the same bits."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from runtime.kernels.load import kernels

# bytes of weights between two threads: of a whole layer or expert, which one thread computes with
# fewer calls, and of rows, for which threads meet within one call
MIN_SHARE = 4 << 20
MIN_ROWS = 256 << 10

Part = Callable[[], None]


class KernelThreads:
    """The caller's thread and up to `count` - 1 others, which run parts of one token's work and
    start when they are first needed. For one caller at a time. `num_used`: the most threads that
    have computed side by side so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_used = 1
        self._team: _Team | None = None

    def num_shares(self, nbytes: int) -> int:
        """Return over how many threads it is worth dividing work that reads `nbytes` bytes."""
        return max(1, min(self.count, nbytes // MIN_SHARE))

    def num_row_shares(self, nbytes: int) -> int:
        """Return the same for rows that one compiled function divides."""
        return max(1, min(self.count, nbytes // MIN_ROWS))

    def run(self, parts: Sequence[Part]) -> None:
        """Do at most `count` parts, the first on the caller's thread, and return when all are done.
        Raises the error of a part once the others have ended."""
        self.num_used = max(self.num_used, len(parts))
        if len(parts) > 1:
            self._opened().run(parts)
        elif parts:
            parts[0]()

    def run_compiled(self, function: int, operand: int, num_shares: int) -> None:
        """Call the compiled function at this address on at most `num_shares` threads, as
        `runtime.kernels.cpu.team.run` does, and return when its pieces are done."""
        self.num_used = max(self.num_used, num_shares)
        kernels("cpu.team").run(self._opened().state, function, operand, num_shares)

    def wake(self) -> None:
        """Let threads that sleep get ready for work that is about to come."""
        if self.count > 1:
            team = kernels("cpu.team")
            team.post(self._opened().state, team.WAKE, 0)

    def close(self) -> None:
        """End the threads. Further calls do nothing."""
        if self._team:
            self._finalizer()
            self._team = None

    def _opened(self) -> "_Team":
        """The team of this process: a fork has none of its parent's threads."""
        if self._team is None or self._team.process != os.getpid():
            self._team = _Team(self.count)
            self._finalizer = weakref.finalize(self, self._team.close)
        return self._team


class _Team:
    """The other threads, their shared state, and the parts and errors of a job in Python."""

    def __init__(self, count: int) -> None:
        self.process = os.getpid()
        self.state = _aligned_state()
        self._parts: Sequence[Part] = ()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(
                target=self._work, args=(share,), name=f"moectl-kernels_{share}", daemon=True
            )
            for share in range(1, count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, parts: Sequence[Part]) -> None:
        """Do these parts as `KernelThreads.run` says."""
        team = kernels("cpu.team")
        self._parts = parts
        self._errors = []
        team.post(self.state, team.PYTHON, len(parts))
        try:
            parts[0]()
        finally:
            team.until_done(self.state, len(parts) - 1)  # they use memory that the caller may free
            self._parts = ()
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """End the threads."""
        if self.process == os.getpid():
            team = kernels("cpu.team")
            team.post(self.state, team.CLOSE, 0)
            for thread in self._threads:
                thread.join()

    def _work(self, share: int) -> None:
        team = kernels("cpu.team")
        job = 0
        while (job := team.work(self.state, share, job)) & team.KIND != team.CLOSE:
            try:
                self._parts[share]()
            except BaseException as error:
                self._errors.append(error)
            team.end(self.state)


def _aligned_state() -> np.ndarray:
    """Return a new state for `runtime.kernels.cpu.team`, at the start of a line of the cache."""
    team = kernels("cpu.team")
    room = np.zeros(team.STATE + 8, np.int64)
    first = -room.ctypes.data % 64 // 8
    state = room[first : first + team.STATE]
    team.prepare(state)
    return state


def divided(nbytes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Return the indices of pieces of `nbytes` bytes, divided into at most `num_shares` shares. The
    largest piece comes first, and each goes to the share that has the fewest bytes. No share is
    empty, and the first has the largest piece."""
    shares: list[list[int]] = [[] for _ in range(min(num_shares, len(nbytes)))]
    held = [0] * len(shares)
    for index in sorted(range(len(nbytes)), key=nbytes.__getitem__, reverse=True):
        least = held.index(min(held))
        shares[least].append(index)
        held[least] += nbytes[index]
    return shares

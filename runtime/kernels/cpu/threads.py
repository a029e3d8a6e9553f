"""Threads that compute parts of a token's work side by side: kernels that release the GIL, each for
rows of its own. The sum of a row does not depend on how the work was divided: every number of
threads gives the same bits."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np

# bytes of weights: 4 MiB between two threads take as long as on one, 8 MiB two thirds
MIN_SHARE = 4 << 20


class KernelThreads:
    """The caller's thread and up to `count` - 1 others, which run parts of one token's work and
    start when they are first needed. For one caller at a time. `num_used`: the most threads that
    have computed side by side so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_used = 1
        self._open()

    def num_shares(self, nbytes: int) -> int:
        """Return over how many threads it is worth dividing work that reads `nbytes` bytes."""
        return max(1, min(self.count, nbytes // MIN_SHARE))

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Do at most `count` parts, the first on the caller's thread, and return when all are done.
        Raises the error of a part once the others have ended."""
        if os.getpid() != self._process:  # a fork has none of its parent's threads
            self._open()
        others: list[Future] = []
        try:
            others.extend(map(self._others.submit, parts[1:]))
            parts[0]()
            for other in others:
                other.result()
        except BaseException:
            wait(others)  # they use memory that the caller may now free
            raise
        self.num_used = max(self.num_used, len(parts))

    def close(self) -> None:
        """End the threads. Further calls do nothing."""
        self._others.shutdown()

    def _open(self) -> None:
        self._process = os.getpid()
        self._others = ThreadPoolExecutor(max(1, self.count - 1), "moectl-kernels")


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


Projection = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]
"""Function of an address, a bias [O] or [0], x [I] and out [O], like
`runtime.kernels.cpu.gated.project`."""


def by_rows(project: Projection, threads: KernelThreads, num_shares: int) -> Projection:
    """Return `project` of a matrix, divided into `num_shares` shares of its rows."""

    def divided_project(address: int, bias: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
        borders = [len(out) * share // num_shares for share in range(num_shares + 1)]
        threads.run(
            [
                partial(project, address + first * x.nbytes, bias[first:last], x, out[first:last])
                for first, last in zip(borders, borders[1:], strict=False)
            ]
        )

    return divided_project

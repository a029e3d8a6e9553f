"""Links with injected faults, for torments and tests: the real links, with faults where bytes
move."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from runtime.links import choose
from runtime.links.emulated import EmulatedLink
from runtime.links.link import DiskLink, ThreadTransfer, Transfer
from runtime.tiers import open as tiers

_LONG_S = 60.0  # longer than a thread waits on a busy machine


class Faults:
    """The faults to inject. `issuing`, `moving` and `landing` are called with the number of the
    issue, of the transfer and of the query for completion; they may raise, sleep, or return False.
    `patience_s` is the disk link's timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.mend()

    def mend(self) -> None:
        """Remove all faults and count from 0 again."""
        with self._lock:
            self.num_issued = self.num_moved = self.num_asked = 0
            self.patience_s = _LONG_S
            self.issuing = self.moving = _nothing
            self.landing: Callable[[int], bool] = lambda number: True

    def issue(self) -> None:
        with self._lock:
            number = self.num_issued
            self.num_issued = self.num_issued + 1
            fault = self.issuing
        fault(number)

    def move(self) -> None:
        with self._lock:
            number = self.num_moved
            self.num_moved = self.num_moved + 1
            fault = self.moving
        fault(number)

    def may_tell(self) -> bool:
        with self._lock:
            number = self.num_asked
            self.num_asked = self.num_asked + 1
            fault = self.landing
        return fault(number)


class FaultyDiskLink(DiskLink):
    """A disk link whose faults occur on its reader threads."""

    def __init__(self, *arguments: object, faults: Faults, **named: object) -> None:
        self._faults = faults
        super().__init__(*arguments, **named | {"kept": None})

    def issue(self, *arguments: object, **named: object) -> ThreadTransfer:
        self._patience_s = self._faults.patience_s
        self._faults.issue()
        return super().issue(*arguments, **named)

    def wait_for_copies(self) -> None:
        self._patience_s = self._faults.patience_s
        super().wait_for_copies()

    def has_landed(self, transfer: ThreadTransfer) -> bool:
        return self._faults.may_tell() and super().has_landed(transfer)

    def _read(self, transfer: ThreadTransfer, out: torch.Tensor) -> None:
        self._faults.move()
        super()._read(transfer, out)


class FaultyEmulatedLink(EmulatedLink):
    """An emulated link, which moves bytes when they are collected; its faults occur there."""

    def __init__(self, *arguments: object, faults: Faults, **named: object) -> None:
        self._faults = faults
        super().__init__(*arguments, **named)

    def issue(self, *arguments: object, **named: object) -> Transfer:
        self._faults.issue()
        return super().issue(*arguments, **named)

    def has_landed(self, transfer: Transfer) -> bool:
        return self._faults.may_tell() and super().has_landed(transfer)

    def collect(self, transfer: Transfer) -> None:
        self._faults.move()
        super().collect(transfer)


@contextmanager
def installed(faults: Faults) -> Iterator[Faults]:
    """Give sessions built within the context links with these faults."""
    disk = partial(FaultyDiskLink, faults=faults)
    emulated = partial(FaultyEmulatedLink, faults=faults)
    with patch.object(choose, "DiskLink", disk), patch.object(tiers, "EmulatedLink", emulated):
        yield faults


def failing(at: int, error: Callable[[], BaseException]) -> Callable[[int], None]:
    """A fault that raises on number `at`."""

    def fault(number: int) -> None:
        if number == at:
            raise error()

    return fault


def failing_from(at: int, error: Callable[[], BaseException]) -> Callable[[int], None]:
    """A fault that raises on number `at` and on all later ones: a single one may be an unused
    prefetch."""

    def fault(number: int) -> None:
        if number >= at:
            raise error()

    return fault


def sleeping(seconds: Callable[[int], float]) -> Callable[[int], None]:
    """A fault that delays every one by these seconds."""
    return lambda number: time.sleep(seconds(number))


def held(at: int, gate: threading.Event) -> Callable[[int], None]:
    """A fault that holds number `at` until `gate` is set."""

    def fault(number: int) -> None:
        if number == at:
            gate.wait()

    return fault


def _nothing(number: int) -> None:
    """No fault."""

"""Links that go wrong on purpose, as torments and tests want them: the real ones, with faults where bytes move."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from runtime.links.disk import DiskLink
from runtime.links.emulated import EmulatedLink
from runtime.links.link import ThreadTransfer, Transfer
from runtime.tiers import open as tiers

_LONG_S = 60.0  # more than a busy machine keeps a thread waiting


class Faults:
    """What goes wrong, and when: `issuing`, `moving` and `landing` are asked with the number of the issue, of the
    transfer that begins, and of the question whether one has landed; they may raise, sleep, or say no. `patience_s` of
    who waits for a disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.mend()

    def mend(self) -> None:
        """Everything goes well from here on, and is counted from 0."""
        with self._lock:
            self.num_issued = self.num_moved = self.num_asked = 0
            self.patience_s = _LONG_S
            self.issuing = self.moving = _nothing
            self.landing: Callable[[int], bool] = lambda number: True

    def issue(self) -> None:
        with self._lock:
            number, self.num_issued, fault = self.num_issued, self.num_issued + 1, self.issuing
        fault(number)

    def move(self) -> None:
        with self._lock:
            number, self.num_moved, fault = self.num_moved, self.num_moved + 1, self.moving
        fault(number)

    def may_tell(self) -> bool:
        with self._lock:
            number, self.num_asked, fault = self.num_asked, self.num_asked + 1, self.landing
        return fault(number)


class FaultyDiskLink(DiskLink):
    """Its reads go wrong on its own threads, and it has no others."""

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
    """Bytes are moved as they are collected, and that is where it goes wrong."""

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
    """Sessions that are built meanwhile have links with these faults."""
    disk, emulated = partial(FaultyDiskLink, faults=faults), partial(FaultyEmulatedLink, faults=faults)
    with patch.object(tiers, "DiskLink", disk), patch.object(tiers, "EmulatedLink", emulated):
        yield faults


def failing(at: int, error: Callable[[], BaseException]) -> Callable[[int], None]:
    """Raises on the one numbered `at`."""

    def fault(number: int) -> None:
        if number == at:
            raise error()

    return fault


def failing_from(at: int, error: Callable[[], BaseException]) -> Callable[[int], None]:
    """Raises on the one numbered `at` and on all after it: one alone may be a prefetch that nobody comes for."""

    def fault(number: int) -> None:
        if number >= at:
            raise error()

    return fault


def sleeping(seconds: Callable[[int], float]) -> Callable[[int], None]:
    """Every one takes so long."""
    return lambda number: time.sleep(seconds(number))


def held(at: int, gate: threading.Event) -> Callable[[int], None]:
    """The one numbered `at` does not go on until `gate` is set."""

    def fault(number: int) -> None:
        if number == at:
            gate.wait()

    return fault


def _nothing(number: int) -> None:
    """All is well."""

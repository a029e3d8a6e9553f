"""Requests of several threads to one session take turns; closing it ends what is under way."""

import threading

from artifacts.errors import BadUsage

_ASK_S = 0.05
_CLOSING_S = 10.0


class Turns:
    """`with turns.lock` is a turn of one pass, as an interruption leaves no lock behind then; `begin` and `end` are one
    of a generation, on a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False
        self._stop = threading.Event()

    def check(self) -> None:
        """Raise BadUsage if there are no more turns."""
        if self.is_closed:
            raise BadUsage("the session is closed: open another one")

    def begin(self, stop: threading.Event) -> bool:
        """Wait for a turn; False where `stop` is set before it comes. Raises BadUsage if there are no more."""
        while not self.lock.acquire(timeout=_ASK_S):
            if stop.is_set():
                return False
        self._stop = stop
        try:
            self.check()
        except BadUsage:
            self.lock.release()
            raise
        return True

    def end(self) -> None:
        """Of a generation whose turn had come. Raises BadUsage if it had to stop for the session to close."""
        stop = self._stop
        self.lock.release()
        if stop.is_set():
            self.check()

    def close(self) -> None:
        """No turn comes any more; the generation that has one is stopped, and waited for unless it is stuck."""
        self.is_closed = True
        self._stop.set()
        if self.lock.acquire(timeout=_CLOSING_S):
            self.lock.release()

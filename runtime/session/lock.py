"""The lock by which requests of several threads take turns in one session."""

import threading

from artifacts.errors import BadUsage

_POLL_S = 0.05
_CLOSING_S = 10.0


class SessionLock:
    """A request holds it for one pass, by `with lock.raw`, or for a generation on a thread of its
    own, by `begin` and `end`. `raw` is a plain lock, so that a pass that is interrupted leaves it
    free."""

    def __init__(self) -> None:
        self.raw = threading.Lock()
        self.is_closed = False
        self._stop = threading.Event()

    def check(self) -> None:
        """Raise BadUsage once the session is closed."""
        if self.is_closed:
            raise BadUsage("the session is closed: open another one")

    def begin(self, stop: threading.Event) -> bool:
        """Wait for the lock; False if `stop` is set first. Raises BadUsage once the session is
        closed."""
        while not self.raw.acquire(timeout=_POLL_S):
            if stop.is_set():
                return False
        self._stop = stop
        try:
            self.check()
        except BadUsage:
            self.raw.release()
            raise
        return True

    def end(self) -> None:
        """Release the lock after a generation. Raises BadUsage if closing the session stopped
        it."""
        stop = self._stop
        self.raw.release()
        if stop.is_set():
            self.check()

    def close(self) -> None:
        """Refuse further requests, stop the generation that holds the lock, and wait for it for at
        most 10 seconds."""
        self.is_closed = True
        self._stop.set()
        if self.raw.acquire(timeout=_CLOSING_S):
            self.raw.release()

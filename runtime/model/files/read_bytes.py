"""Bytes of checkpoints that this process has read, for commands that show how far loading is."""

from threading import Lock


class ReadBytes:
    """Sum over all threads; `nbytes` so far."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


READ = ReadBytes()

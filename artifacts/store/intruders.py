"""Notices that another process wrote, replaced or removed a store that this one has open to write.

DuckDB's lock keeps other writers out, but not on every file system, and nothing keeps a file from
being moved.
"""

import os
from pathlib import Path

from artifacts.errors import OutOfResources

# Headers of DuckDB: of the file, and two of the database, of which each checkpoint replaces one.
_NBYTES = 3 * 4096


class Intruders:
    """Remembers the headers of an open store; `check` compares them before this process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptors = [os.open(path, os.O_RDONLY)]
        self.accept()

    def accept(self) -> None:
        """Remember the headers as they are now: after opening the store, and after this process
        wrote."""
        self._seen = self._headers()

    def came(self) -> bool:
        """Return whether the file was removed, or its headers differ from those that this process
        left."""
        # A network file system looks for what other machines wrote when a file is opened.
        try:
            self._descriptors.append(os.open(self._path, os.O_RDONLY))
        except FileNotFoundError:  # moved away, where what is written is still found, or removed
            if not os.fstat(self._descriptors[-1]).st_nlink:
                return True
        except (
            OSError
        ):  # no more files may be open: the last descriptor shows what this machine wrote
            pass
        return self._headers() != self._seen

    def check(self) -> None:
        """Raise OutOfResources if they differ: this process would overwrite what another one
        wrote."""
        if self.came():
            raise OutOfResources(
                f"another process wrote, replaced or removed {self._path} while this one had it "
                "open, so that nothing was written; run this again, on a store of a local disk "
                "if the file system here has no locks that hold"
            )

    def close(self) -> None:
        """Call it after the store is closed: closing any handle of a file drops DuckDB's lock on
        it."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _headers(self) -> tuple[int, bytes]:
        """Return the number of the file that has the store's name, and its headers."""
        descriptor = self._descriptors[-1]
        return os.fstat(descriptor).st_ino, os.pread(descriptor, _NBYTES, 0)

"""Locks by which two commands do not write into one folder at once."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from artifacts.errors import OutOfResources

_REMEDY = "name a folder on a local disk"


@contextmanager
def locked(path: Path, *, busy: str) -> Iterator[None]:
    """Create the file `path` unless it is there, and hold its lock; the file stays.

    Raises OutOfResources: with the message `busy` when another process holds the lock, and with a
    message of its own when the file system has no locks or grants one lock to two holders.
    """
    with path.open("a") as file:
        if not _is_granted(file, path):
            raise OutOfResources(busy)
        with path.open("a") as other:
            if _is_granted(other, path):
                raise OutOfResources(
                    f"the file system of {path.parent} grants one lock twice, so that two "
                    f"commands could write the same files: {_REMEDY}"
                )
        yield


def _is_granted(file: IO, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OutOfResources(
            f"the file system of {path.parent} has no locks ({error.strerror}): {_REMEDY}"
        ) from error
    return True

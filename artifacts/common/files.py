"""Files that appear whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts.errors import BadInput, OutOfResources

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, of a quota, of what a file may hold


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Lend a temporary path beside `path`; when the block ends well, its file is synced and takes the name `path`.

    When the block fails, the temporary file is removed and what `path` held before stays. Raises BadInput when the
    folder does not exist or may not be written, OutOfResources when the disk is full.
    """
    path = Path(path)
    check_writable(path)
    # The process number keeps two writers of one target from sharing a temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise BadInput when a file of this name cannot be written: worth knowing before the work that fills it."""
    if not path.parent.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"cannot write {path}: the folder {path.parent} is read-only; name another")


def sync(path: Path) -> None:
    """Wait until a file, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: OSError, path: Path) -> BadInput | OutOfResources:
    # Arrow raises OSError without an errno, so its text has to tell.
    if error.errno in FULL or any(sign in str(error) for sign in ("No space left", "File too large")):
        return OutOfResources(f"no space left to write {path}: free some and try again")
    return BadInput(f"cannot write {path}: {error.strerror or error}")

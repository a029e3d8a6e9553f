"""Files that are written whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts.errors import BadInput, OutOfResources

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota used up, file too large


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds, sync that file and give it the
    name `path`.

    When the block fails, the temporary file is removed and the old file at `path` stays. Where
    `path` is a link, the file that it leads to is replaced. Raises BadInput when the folder does
    not exist or is not writable, and when `path` is no plain file, OutOfResources when the disk is
    full.
    """
    check_writable(Path(path))
    path = _target(Path(path))
    # The process number keeps two writers of one target from sharing a temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise as_problem(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise BadInput when a file of this name cannot be written: call it before the work that fills
    the file."""
    folder = _target(path).parent
    if not folder.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise BadInput(f"cannot write {path}: it is a folder; name a file")
    if path.exists() and not path.is_file():
        raise BadInput(f"cannot write {path}: it is no plain file; name another")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write {path}: the folder {folder} is read-only; name another")


def _target(path: Path) -> Path:
    """The file that is meant: a temporary one must lie beside it, on its file system."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_problem(error: OSError, path: Path) -> BadInput | OutOfResources:
    # Arrow raises OSError without an errno, so the text of the message decides.
    if error.errno in FULL or any(
        sign in str(error) for sign in ("No space left", "File too large")
    ):
        return OutOfResources(f"no space left to write {path}: free some and try again")
    return BadInput(f"cannot write {path}: {error.strerror or error}")

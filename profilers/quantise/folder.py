"""The folder of a run's replicas while one process fills it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from artifacts.common.locks import locked


@contextmanager
def owning(folder: Path) -> Iterator[None]:
    """Make the folder and lock it against other processes; a folder that is left empty is removed
    at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with locked(path, busy=f"another moectl quantize is filling {folder}: wait until it ends"):
        try:
            yield
        finally:
            _leave(folder, path)


def _leave(folder: Path, lock: Path) -> None:
    """Remove the folder if it is empty. Only the holder of the lock may: a folder just begun looks
    empty to others."""
    with suppress(OSError):  # another process has moved the folder or begun to fill it
        if [*folder.iterdir()] == [lock]:
            lock.unlink()
            folder.rmdir()
        if not [*folder.parent.iterdir()]:
            folder.parent.rmdir()


@contextmanager
def scratch_folder(replicas: Path) -> Iterator[Path]:
    """An empty folder beside the replicas, removed at the end."""
    folder = replicas / ".scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Open one DuckDB file, and turn every way of failing into one line with its remedy."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from artifacts.errors import BadInput, OutOfResources, Problem, first_line, shortage

_MAGIC = slice(8, 12)
_FULL = ("No space left", "Disk quota", "File too large")
_WAL = ("replaying WAL", "Corrupt WAL", "This WAL was created", "WAL does not match")
PATIENCE_S = 10.0  # how long a command waits to write hours of work; others hold the store for less
_READER_RETRIES = 5
_RETRY_S = 0.2


def connect(path: Path, *, read_only: bool, patience_s: float | None = None) -> duckdb.DuckDBPyConnection:
    """Open the file; a writer creates it if it does not exist.

    A reader waits one second for a writer to finish; a writer waits for `patience_s`, by default not at all. Raises
    BadInput (not a DuckDB file, damaged, no such folder or file), OutOfResources (in use by another process, named by
    its number).
    """
    _check_file(path, read_only=read_only)
    retries = int(patience_s / _RETRY_S) if patience_s is not None else _READER_RETRIES if read_only else 0
    with translated(path):
        for _ in range(retries):
            try:
                return connection_to(path, read_only=read_only)
            except duckdb.IOException as error:
                if not _is_locked(error):
                    raise
                time.sleep(_RETRY_S)
        return connection_to(path, read_only=read_only)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn DuckDB's errors about the file, the disk or memory into a Problem; errors in our SQL pass through."""
    try:
        yield
    except (duckdb.ProgrammingError, duckdb.IntegrityError, duckdb.DataError):
        raise
    except duckdb.Error as error:
        raise _problem(error, path) from error


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Commit all changes of the block, or none."""
    connection.begin()
    try:
        yield
        connection.commit()
    except BaseException:
        _roll_back(connection)
        raise


def check_place(path: Path) -> None:
    """Raise BadInput where no store can be created."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder, not a store; name a file")
    if not path.parent.is_dir():
        raise BadInput(f"there is no folder {path.parent} for the store {path.name}; make it first")


def connection_to(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    """Open the file without checking it first, unlike `connect`; errors are DuckDB's own."""
    # Without these options DuckDB may download extensions, and spills into the working directory.
    config = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "temp_directory": f"{path}.tmp",
    }
    connection = duckdb.connect(str(path), read_only=read_only, config=config)
    connection.execute("SET enable_progress_bar = false")  # where Python is interactive it would go to stdout
    return connection


def _check_file(path: Path, *, read_only: bool) -> None:
    check_place(path)
    if not path.exists():
        if read_only:
            raise BadInput(f"there is no store {path}; moectl profile makes one")
        return
    try:
        with path.open("rb") as file:
            head = file.read(_MAGIC.stop)
    except OSError as error:
        raise BadInput(f"cannot read the store {path}: {error.strerror}") from error
    # DuckDB would try to convert an SQLite or a CSV file.
    if head[_MAGIC] != b"DUCK":
        raise BadInput(f"{path} is not a store (no DuckDB file); name another file or remove it")


def _problem(error: duckdb.Error, path: Path) -> Problem:
    text = str(error)
    if any(sign in text for sign in _WAL):
        return BadInput(
            f"{path}.wal beside the store is damaged or of another one ({first_line(error)}); move it away: every run "
            "that was told complete is in the store itself"
        )
    if _is_locked(error):
        return OutOfResources(f"{path} {_held(error)}")
    if any(sign in text for sign in _FULL):
        return OutOfResources(f"no space left on the disk of {path}; free some and try again: earlier runs are kept")
    if isinstance(error, duckdb.OutOfMemoryException) or shortage(error):
        return OutOfResources(f"cannot work on {path} ({first_line(error)}): {shortage(error) or 'not enough memory'}")
    if "Permission denied" in text or "Read-only file system" in text:
        return BadInput(f"may not write {path}; change its permissions or name another store")
    return BadInput(f"{path} is damaged ({first_line(error)}); restore it from a copy or make it anew")


def _is_locked(error: duckdb.Error) -> bool:
    return "Could not set lock" in str(error)


def _held(error: duckdb.Error) -> str:
    """Return what to say of a file whose lock was not granted."""
    holder = re.search(r"PID ([1-9]\d*)", str(error))
    if holder:
        return f"is in use by process {holder[1]}; wait until it ends or name another store"
    # A holder of another machine or container has no number here, and where there are no locks nothing holds it.
    return (
        "is in use by a process that is not seen here, or its file system has no locks; wait, or name a store on a "
        "local disk"
    )


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    # After a fatal error DuckDB refuses to roll back too; the error that is already being raised is the one to report.
    try:
        connection.rollback()
    except duckdb.Error:
        connection.close()

"""Open one DuckDB file, and turn every way of failing into one line with its remedy."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from artifacts.common.host_memory import host_memory
from artifacts.errors import BadInput, OutOfResources, Problem, first_line, shortage
from artifacts.store.schema import literal, quoted

_MAGIC = slice(8, 12)
_FULL = ("No space left", "Disk quota", "File too large")
_WAL = ("replaying WAL", "Corrupt WAL", "This WAL was created", "WAL does not match")
PATIENCE_S = 10.0  # how long a command waits to write hours of work; others hold the store for less
_READER_RETRIES = 5
_RETRY_S = 0.2
LONGEST_S = 600.0  # of one step: to write a trace of gigabytes to a slow disk takes a part of it
_MOST_NBYTES = 8 << 30
_MOST_SPILLED_NBYTES = 32 << 30
# connections of one file share its configuration, which the first of them locks
_OPENING = threading.Lock()


def connect(
    path: Path, *, read_only: bool, patience_s: float | None = None
) -> duckdb.DuckDBPyConnection:
    """Open the file; a writer creates it if it does not exist.

    A reader waits one second for a writer to finish; a writer waits for `patience_s`, by default
    not at all. Raises BadInput (not a DuckDB file, damaged, no such folder or file), OutOfResources
    (in use by another process, named by its number).
    """
    _check_file(path, read_only=read_only)
    retries = (
        int(patience_s / _RETRY_S)
        if patience_s is not None
        else _READER_RETRIES
        if read_only
        else 0
    )
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
def limited(connection: duckdb.DuckDBPyConnection, path: Path) -> Iterator[None]:
    """Stop what the block asks of DuckDB after `LONGEST_S`, and turn errors as `translated`
    does."""
    timer = threading.Timer(LONGEST_S, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        with translated(path):
            yield
    finally:
        timer.cancel()


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn DuckDB's errors about the file, the disk or memory into a Problem; errors in our SQL
    pass through."""
    try:
        yield
    except RuntimeError as error:
        if "Query interrupted" in str(error):  # how DuckDB says that the user pressed Ctrl-C
            raise KeyboardInterrupt from error
        raise
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


def checkpoint(connection: duckdb.DuckDBPyConnection) -> None:
    """Put what is in the write-ahead log into the file itself."""
    connection.execute(f"CHECKPOINT {_database(connection)}")


def check_place(path: Path) -> None:
    """Raise BadInput where no store can be created."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder, not a store; name a file")
    if not path.parent.is_dir():
        raise BadInput(f"there is no folder {path.parent} for the store {path.name}; make it first")


@contextmanager
def defining(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Let the block create tables, which DuckDB does in the first schema of the path; it must call
    no function. After an error the connection is to be closed."""
    whole = _search_path(connection)
    connection.execute(f"SET search_path = {literal(whole.removeprefix(_BUILT_IN))}")
    yield
    connection.execute(f"SET search_path = {literal(whole)}")


def connection_to(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    """Open the file without checking it first, unlike `connect`; errors are DuckDB's own.

    No query on it reads or writes another file, loads an extension or changes these settings,
    whatever the file holds.
    """
    config = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "enable_external_access": False,
        # a table that is not there would be looked for among Python's variables
        "python_enable_replacements": False,
        "memory_limit": f"{memory_limit()}B",
        "max_temp_directory_size": f"{_MOST_SPILLED_NBYTES}B",
    }
    with _OPENING:
        # An absolute path: DuckDB takes the beginning of another one, as in s3:x or :memory:, for a
        # scheme.
        connection = duckdb.connect(str(path.absolute()), read_only=read_only, config=config)
        try:
            _confine(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def memory_limit() -> int:
    """Bytes that DuckDB may use."""
    return min(_MOST_NBYTES, host_memory()[0] // 2 or _MOST_NBYTES)


def _confine(connection: duckdb.DuckDBPyConnection) -> None:
    # First, and without a function or an operator: a macro of the file goes before DuckDB's
    # function of its name, and a file may hold one called max or +. Behind the built-in schema in
    # the path it is never found.
    connection.execute(f"SET search_path = {literal(_search_path(connection))}")
    [(is_locked,)] = connection.execute("SELECT current_setting('lock_configuration')").fetchall()
    if not is_locked:
        # where Python is interactive it would go to stdout
        connection.execute("SET enable_progress_bar = false")
        # `Store.close` does it: not when another process wrote the file meanwhile.
        connection.execute("PRAGMA disable_checkpoint_on_shutdown")
        connection.execute("SET lock_configuration = true")


_BUILT_IN = "system.main,"


def _search_path(connection: duckdb.DuckDBPyConnection) -> str:
    return f"{_BUILT_IN}{_database(connection)}.main"


def _database(connection: duckdb.DuckDBPyConnection) -> str:
    """The name that DuckDB gives the file, quoted."""
    databases = connection.execute(
        "SELECT database_name, internal FROM system.main.duckdb_databases()"
    ).fetchall()
    [name] = [name for name, is_internal in databases if not is_internal]
    return quoted(name)


def _check_file(path: Path, *, read_only: bool) -> None:
    if read_only and not path.exists():
        raise BadInput(f"there is no store {path}; moectl profile makes one")
    check_place(path)
    if not path.exists():
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
            f"{path}.wal beside the store is damaged or of another one ({first_line(error)}); "
            "move it away: every run that was told complete is in the store itself"
        )
    if _is_locked(error):
        return OutOfResources(f"{path} {_held(error)}")
    if isinstance(error, duckdb.InterruptException):
        return OutOfResources(
            f"a query on {path} took longer than {LONGEST_S / 60:.0f} minutes and was stopped; "
            "nothing was changed"
        )
    if any(sign in text for sign in _FULL):
        return OutOfResources(
            f"no space left on the disk of {path}; free some and try again: earlier runs are kept"
        )
    if isinstance(error, duckdb.OutOfMemoryException) or shortage(error):
        return OutOfResources(
            f"cannot work on {path} ({first_line(error)}): {shortage(error) or 'not enough memory'}"
        )
    if "Permission denied" in text or "Read-only file system" in text:
        return BadInput(f"may not write {path}; change its permissions or name another store")
    return BadInput(
        f"{path} is damaged ({first_line(error)}); restore it from a copy or make it anew"
    )


def _is_locked(error: duckdb.Error) -> bool:
    return "Could not set lock" in str(error)


def _held(error: duckdb.Error) -> str:
    """Return what to say of a file whose lock was not granted."""
    holder = re.search(r"PID ([1-9]\d*)", str(error))
    if holder:
        return f"is in use by process {holder[1]}; wait until it ends or name another store"
    # A holder of another machine or container has no number here, and where there are no locks
    # nothing holds it.
    return (
        "is in use by a process that is not seen here, or its file system has no locks; wait, or "
        "name a store on a local disk"
    )


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    # After a fatal error DuckDB refuses to roll back too; the error that is already being raised is
    # the one to report.
    try:
        connection.rollback()
    except duckdb.Error:
        connection.close()

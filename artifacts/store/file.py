"""The file of a store: created whole, or refused with a remedy."""

import os
from pathlib import Path

import duckdb

from artifacts.common.files import sync
from artifacts.errors import BadInput, Incompatible
from artifacts.store.database import (
    check_place,
    checkpoint,
    connect,
    connection_to,
    defining,
    limited,
    transaction,
    translated,
)
from artifacts.store.runs import utc_now, versions
from artifacts.store.schema import SCHEMA_VERSION, TABLES, lacking, statements
from artifacts.store.structure import refuse_strange, stored_columns

_TRIES = 5

Identity = tuple[int, int]  # device and inode: a file, whatever its name


def open_file(
    path: Path, *, read_only: bool, patience_s: float | None = None
) -> tuple[duckdb.DuckDBPyConnection, Identity | None]:
    """Open a store; also return the identity of its file if it was created just now. Raises as
    `Store.open`."""
    connection, made = _connect(path, read_only=read_only, patience_s=patience_s)
    try:
        with limited(connection, path):
            if _is_empty(connection, path, read_only=read_only):
                _fill(connection)
    except BaseException:
        connection.close()
        raise
    return connection, made


def remove_made(path: Path, made: Identity) -> None:
    """Remove a store that was created but not written to, unless another file has its name by now.

    Call it while the connection is still open: another process that opened the file meanwhile would
    write into a removed one.
    """
    if _identity(path) == made:
        _remove(path)


def wal_of(path: Path) -> Path:
    """The path of a store's write-ahead log."""
    return path.with_name(f"{path.name}.wal")


def _connect(
    path: Path, *, read_only: bool, patience_s: float | None
) -> tuple[duckdb.DuckDBPyConnection, Identity | None]:
    """Connect to the file that is at `path` once it is open: a file that was replaced in between is
    not written to."""
    for _ in range(_TRIES):
        is_new = not read_only and not path.exists() and _make(path)
        before = _identity(path)
        connection = connect(path, read_only=read_only, patience_s=patience_s)
        if read_only or _identity(path) == before:
            return connection, before if is_new else None
        connection.close()
    raise BadInput(
        f"{path} was replaced each time it was opened: name a store that nothing else moves"
    )


def _identity(path: Path) -> Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _make(path: Path) -> bool:
    """Create a store without runs, whole or not at all; False when another process was faster."""
    check_place(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with translated(path):
            connection = connection_to(temporary, read_only=False)
            try:
                _fill(connection)
                checkpoint(connection)
            finally:
                connection.close()
        sync(temporary)
        return _named(temporary, path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    wal_of(path).unlink(missing_ok=True)


def _named(temporary: Path, path: Path) -> bool:
    """Give a file its name unless another file has it by now."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if path.exists():
            return False
        temporary.rename(path)
    return True


def _is_empty(connection: duckdb.DuckDBPyConnection, path: Path, *, read_only: bool) -> bool:
    """Check that the file is a store of this schema, or without tables, as another DuckDB leaves
    one: then a writer fills it."""
    tables = stored_columns(connection)
    if not tables and not read_only:
        return True
    if not tables:
        raise BadInput(f"{path} is empty; moectl profile fills it")
    if "schema_version" not in tables:
        raise BadInput(f"{path} is a DuckDB file but not a store of moectl; name another file")
    # First: another moectl may have other tables.
    refuse_strange(connection, path, {"schema_version"})
    version = _version(connection)
    if version is None or version < 1:
        raise BadInput(
            f"{path} is damaged: it has no version of its tables; restore it from a copy or make "
            "it anew"
        )
    if version != SCHEMA_VERSION:
        age, remedy = (
            ("a newer", "upgrade moectl")
            if version > SCHEMA_VERSION
            else ("an older", "name another store and make its artefacts anew")
        )
        raise Incompatible(
            f"{path} was made by {age} moectl (schema {version}, this one knows {SCHEMA_VERSION}); "
            f"{remedy}"
        )
    refuse_strange(connection, path, TABLES)
    if not read_only and (missing := lacking(tables)):
        raise Incompatible(
            f"{path} lacks {missing}: nothing is written into it; name another store and make its "
            "artefacts anew"
        )
    return False


def _version(connection: duckdb.DuckDBPyConnection) -> int | None:
    [(version,)] = connection.execute("SELECT max(version) FROM schema_version").fetchall()
    return version


def _fill(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the tables, all of them or none, and record their version."""
    made_with = versions().get("moectl", "not installed")
    with defining(connection), transaction(connection):
        connection.execute("; ".join(statements()))
        connection.execute(
            "INSERT INTO schema_version VALUES (?, ?, ?)", [SCHEMA_VERSION, utc_now(), made_with]
        )

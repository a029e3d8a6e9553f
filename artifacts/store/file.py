"""The file of a store: created whole, upgraded after a copy, or refused with a remedy."""

import os
import shutil
from pathlib import Path

import duckdb

from artifacts.common.files import replacing, sync
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
from artifacts.store.schema import (
    SCHEMA_VERSION,
    TABLES,
    comments,
    migration,
    quoted,
    statements,
    unmendable,
)
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
            version = _check(connection, path, is_filled=read_only)
            is_old = not read_only and _is_old(connection, version)
            if is_old:
                checkpoint(connection)  # the copy would lack what is still in the write-ahead log
        if is_old:
            connection.close()
            _keep_copy(path, version)
            connection = connect(path, read_only=False, patience_s=patience_s)
        if not read_only:
            with limited(connection, path):
                _complete(connection, path, version, is_old=is_old)
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
                with defining(connection), transaction(connection):
                    _execute(connection, statements())
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


def _is_old(connection: duckdb.DuckDBPyConnection, version: int | None) -> bool:
    """Whether a writer has to upgrade the file, after a copy. One without tables has nothing to
    copy."""
    present = stored_columns(connection)
    is_whole = all(present.get(table) == each.columns.keys() for table, each in TABLES.items())
    return version is not None and (version < SCHEMA_VERSION or not is_whole)


def _complete(
    connection: duckdb.DuckDBPyConnection, path: Path, version: int | None, *, is_old: bool
) -> None:
    """Fill a file that another DuckDB left without tables, upgrade an old one, and add comments
    that are missing."""
    if version is None:
        with defining(connection), transaction(connection):
            _execute(connection, statements())
    elif is_old:
        _upgrade(connection, path, version)
    # The comments of columns are written with that of their table, and take as long to read as all
    # the rest.
    said = dict(connection.execute("SELECT table_name, comment FROM duckdb_tables()").fetchall())
    if missing := comments(said):
        with defining(connection), transaction(connection):
            connection.execute("; ".join(missing))


def _check(
    connection: duckdb.DuckDBPyConnection, path: Path, *, is_filled: bool = True
) -> int | None:
    """The version of a store that this moectl can read; None for an empty file, which is an error
    if `is_filled`."""
    tables = stored_columns(connection)
    if not tables and not is_filled:
        return None
    if not tables:
        raise BadInput(f"{path} is empty; moectl profile fills it")
    if "schema_version" not in tables:
        raise BadInput(f"{path} is a DuckDB file but not a store of moectl; name another file")
    refuse_strange(
        connection, path, {"schema_version"}
    )  # first: a newer moectl may have other tables
    version = _version(connection)
    if version is None or version < 1:
        raise BadInput(
            f"{path} is damaged: it has no version of its tables; restore it from a copy or make "
            "it anew"
        )
    if version > SCHEMA_VERSION:
        raise Incompatible(
            f"{path} was made by a newer moectl (schema {version}, this one knows "
            f"{SCHEMA_VERSION}); upgrade moectl"
        )
    refuse_strange(connection, path, TABLES)
    return version


def _version(connection: duckdb.DuckDBPyConnection) -> int | None:
    [(version,)] = connection.execute("SELECT max(version) FROM schema_version").fetchall()
    return version


def _keep_copy(path: Path, version: int) -> None:
    """Copy `moe.duckdb` to `moe.duckdb.v1`. The store must be closed: closing any handle of the
    file drops its lock."""
    with replacing(path.with_name(f"{path.name}.v{version}")) as temporary:
        shutil.copyfile(path, temporary)


def _upgrade(connection: duckdb.DuckDBPyConnection, path: Path, version: int) -> None:
    """Add what the present schema has and the file lacks, all of it or nothing; stored rows
    stay."""
    present = {
        table: names for table, names in stored_columns(connection).items() if table in TABLES
    }
    filled = {
        name
        for name in present
        if connection.execute(f"SELECT 1 FROM {quoted(name)} LIMIT 1").fetchall()
    }
    if lost := unmendable(present, filled):
        raise Incompatible(
            f"{path} was written by a moectl between two releases (schema {version}): {lost}. "
            "Nothing was changed; name another store and make its artefacts anew"
        )
    with defining(connection), transaction(connection):
        _execute(connection, migration(present))


def _execute(connection: duckdb.DuckDBPyConnection, ddl: list[str]) -> None:
    """Run the statements and record the version that they lead to."""
    connection.execute("; ".join(ddl))
    made_with = versions().get("moectl", "not installed")
    connection.execute(
        "INSERT INTO schema_version VALUES (?, ?, ?)", [SCHEMA_VERSION, utc_now(), made_with]
    )

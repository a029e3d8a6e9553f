"""Checks for anything in a file that moectl does not write. A store may come from a stranger, and
no query is run on tables that compute something."""

import re
from collections.abc import Collection
from pathlib import Path

import duckdb

from artifacts.errors import BadInput, OutOfResources
from artifacts.store.database import memory_limit
from artifacts.store.schema import CONTROL_TABLES, TABLES, literal

_SHOWN = 40  # characters of a name that the file gives
_UNPACKED = 100  # bytes in memory for each of the file; what moectl writes has at most 20
# of the list of runs, and of one text anywhere
_MOST_CONTROL_NBYTES = 64 << 20
_MOST_TEXT_NBYTES = 4 << 20
_COLUMN = re.compile(r'(?:"(\w+)"|(\w+)) (.+)', re.DOTALL)
_CHECK = re.compile(r"CHECK \((.+)\)")
_BARE = str.maketrans("", "", '()"')
_TABLES = "SELECT table_name, sql FROM duckdb_tables() WHERE schema_name = 'main'"
_VIEWS = "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal"
_EXTRAS = """
    SELECT 'an index on', table_name FROM duckdb_indexes() WHERE schema_name = 'main'
    UNION ALL SELECT 'a trigger on', table_name FROM duckdb_triggers() WHERE schema_name = 'main'"""


def stored_columns(connection: duckdb.DuckDBPyConnection) -> dict[str, set[str]]:
    """Names of the columns in the file, by table. A name that is no plain word is left out: no
    moectl wrote it."""
    definitions = {table: _parts(sql) for table, sql in connection.execute(_TABLES).fetchall()}
    return {
        table: {name for name in map(_name, parts) if name} for table, parts in definitions.items()
    }


def refuse_strange(
    connection: duckdb.DuckDBPyConnection, path: Path, tables: Collection[str]
) -> None:
    """Raise BadInput where something about one of these tables differs from the tables that moectl
    makes.

    Views, computed columns, defaults, checks, indexes and triggers would run what the file says.
    Tables and views of other names are the user's own: nothing names them.
    """
    if what := _strange(connection, tables):
        raise BadInput(
            f"{path} has {what}, which moectl did not make, so that it is not read: name another "
            "store or make it anew"
        )


def check_size(connection: duckdb.DuckDBPyConnection, table: str, path: Path) -> None:
    """Raise OutOfResources when a table is far larger in memory than the file, or a text longer
    than any of moectl's; nothing is unpacked to find out."""
    rows = connection.execute(
        f"SELECT segment_type, count, stats FROM pragma_storage_info({literal(table)})"
    )
    num_values = num_text_nbytes = longest = 0
    for kind, count, stats in rows.fetchall():
        num_values += count * (kind != "VALIDITY")
        num_text_nbytes += stats.get("total_string_length") or 0
        longest = max(longest, stats.get("max_string_length") or 0)
    nbytes = 8 * num_values + num_text_nbytes
    most = (
        _MOST_CONTROL_NBYTES
        if table in CONTROL_TABLES
        else max(memory_limit(), _UNPACKED * path.stat().st_size)
    )
    if longest > _MOST_TEXT_NBYTES:
        raise OutOfResources(
            f"{path} holds a text of {longest / 2**20:,.0f} MiB in {table}, more than moectl "
            "writes: make it anew"
        )
    if nbytes > most:
        raise OutOfResources(
            f"{table} of {path} unpacks to {nbytes / 2**30:,.1f} GiB, more than "
            f"{most / 2**30:,.2f}: make it anew"
        )


def _strange(connection: duckdb.DuckDBPyConnection, tables: Collection[str]) -> str:
    """Return one thing that no moectl made, in words; empty where there is none."""
    stored = dict(connection.execute(_TABLES).fetchall())
    for table, sql in stored.items():
        if table.lower() in tables and (
            strange := [part for part in _parts(sql) if not _is_ours(table, part)]
        ):
            return f"{_shown(strange[0])} in {_shown(table)}"
    for kind, table in connection.execute(_EXTRAS).fetchall():
        if table.lower() in tables:
            return f"{kind} {table.lower()}"
    # It takes as long as all the rest, and no view can have the name of a table.
    views = connection.execute(_VIEWS).fetchall() if tables - stored.keys() else ()
    return next(
        (f"a view in the place of {_shown(name)}" for (name,) in views if name.lower() in tables),
        "",
    )


def _parts(sql: str) -> list[str]:
    """Split `CREATE TABLE name(a, b);` as DuckDB writes it at the commas outside brackets.

    A comma within a name that the file gives splits it too: into parts that are none of moectl's.
    """
    inner = sql[sql.index("(") + 1 : sql.rindex(")")]
    return [part.strip() for part in re.split(r",(?![^()]*\))", inner)]


def _name(part: str) -> str | None:
    """The column that a part of a table's definition defines."""
    match = _COLUMN.fullmatch(part)
    return (
        None
        if match is None or part.startswith(("CHECK(", "PRIMARY KEY("))
        else match[1] or match[2]
    )


def _is_ours(table: str, part: str) -> bool:
    """Return whether moectl writes this part of a table's definition."""
    columns = TABLES[table].columns if table in TABLES else {}
    conditions = [_CHECK.search(column.definition) for column in columns.values()]
    if part.startswith("CHECK("):
        return part.translate(_BARE) in {
            f"CHECK{match[1]}".translate(_BARE) for match in conditions if match
        }
    name = _name(part)
    if name not in columns:
        return False
    definition = _CHECK.sub("", columns[name].definition).strip()
    return _COLUMN.fullmatch(part)[3] == definition


def _shown(text: str) -> str:
    """A text of the file in a message: shortened, and without what a terminal would follow."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")

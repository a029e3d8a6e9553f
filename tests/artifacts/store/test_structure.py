"""Stores of strangers: what they hold beside rows is refused or never runs."""

from pathlib import Path

import duckdb
import pytest

from artifacts.errors import BadInput, OutOfResources
from artifacts.store import database, structure
from artifacts.store.schema import TABLES
from artifacts.store.store import Store
from artifacts.store.structure import stored_columns
from tests.helpers.stores import MODEL, verified, write

NEVER = (
    "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 0 FROM r) SELECT count(*) AS version "
    "FROM r"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "moe.duckdb"
    write(path, 100)
    return path.read_bytes()


@pytest.fixture
def store(whole: bytes, tmp_path: Path) -> Path:
    (tmp_path / "secret.csv").write_text("version\n5\n")
    path = tmp_path / "moe.duckdb"
    path.write_bytes(whole)
    return path


def changed(store: Path, *statements: str) -> None:
    with duckdb.connect(str(store)) as connection:
        for statement in statements:
            connection.execute(statement.format(folder=store.parent))


def again(name: str, definition: str) -> list[str]:
    return [f"ALTER TABLE {name} RENAME TO {name}_", definition]


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (
            again(
                "presets", "CREATE VIEW presets AS SELECT * FROM read_csv('{folder}/secret.csv')"
            ),
            "view in the place",
        ),
        (
            again(
                "models",
                "CREATE VIEW models AS SELECT a.range FROM range(1000000000) a, range(1000000000)",
            ),
            "models",
        ),
        (
            again("traces", "CREATE VIEW TRACES AS SELECT * FROM read_blob('/etc/passwd')"),
            "view in the place of 'TRACES'",
        ),
        (again("runs", "CREATE TABLE Runs AS FROM runs_"), "in 'Runs'"),
        (["ALTER TABLE presets ALTER name SET DEFAULT repeat('x', 1000000000)"], "DEFAULT"),
        (
            again(
                "splits",
                "CREATE TABLE splits (run_id INTEGER NOT NULL, layer AS (len(range(run_id))))",
            ),
            "GENERATED",
        ),
        (
            again(
                "splits",
                "CREATE TABLE splits (run_id INTEGER NOT NULL CHECK (len(range(run_id)) > 0))",
            ),
            "CHECK",
        ),
        (again("splits", "CREATE TABLE splits (run_id INTEGER UNIQUE NOT NULL)"), "UNIQUE"),
        (["CREATE UNIQUE INDEX i ON models (family)"], "an index on models"),
        (["CREATE TRIGGER t AFTER INSERT ON runs DELETE FROM models"], "a trigger on runs"),
        (["ALTER TABLE models ALTER num_experts TYPE VARCHAR"], "num_experts VARCHAR"),
        (
            [
                "CREATE TYPE kind AS ENUM ('a')",
                "ALTER TABLE models ALTER family TYPE kind USING 'a'::kind",
            ],
            "family",
        ),
        (['ALTER TABLE models ADD COLUMN "x\ny\x1b[2J" INTEGER'], r"x\\ny\\x1b"),
        (
            again(
                "models",
                f'CREATE TABLE models ("{"model_id VARCHAR PRIMARY KEY, name"}" VARCHAR NOT NULL)',
            ),
            "models",
        ),
    ],
)
@pytest.mark.parametrize("read_only", [True, False])
def test_tables_that_compute_are_refused(
    store: Path, statements: list[str], said: str, read_only: bool
) -> None:
    changed(store, *statements)
    before = store.read_bytes()
    with pytest.raises(BadInput, match=said) as caught:
        Store.open(store, read_only=read_only)
    assert str(caught.value).isprintable() and "which moectl did not make" in str(caught.value)
    assert store.read_bytes() == before


@pytest.mark.parametrize("view", ["SELECT * FROM read_csv('{folder}/secret.csv')", NEVER])
def test_a_version_that_is_computed_is_none(store: Path, view: str) -> None:
    changed(store, *again("schema_version", f"CREATE VIEW schema_version AS {view}"))
    for read_only in (True, False):
        with pytest.raises(BadInput, match="not a store of moectl"):
            Store.open(store, read_only=read_only)


def test_what_nothing_names_is_left_alone(store: Path) -> None:
    """Macros that hide DuckDB's own functions and operators, and the user's own tables, views and
    schemas."""
    changed(
        store,
        "CREATE MACRO max(a) AS 99",
        "CREATE MACRO coalesce(a, b) AS 99",
        'CREATE MACRO "+"(a, b) AS 99',
        'CREATE MACRO "="(a, b) AS true',
        (
            "CREATE MACRO duckdb_tables() AS TABLE SELECT 'runs' AS table_name, 'x()' AS sql, "
            "'main' AS schema_name"
        ),
        f"CREATE VIEW forever AS {NEVER}",
        "CREATE TABLE incoming (evil INTEGER)",
        "CREATE SCHEMA other",
        "CREATE TABLE other.runs AS SELECT 7 AS run_id",
        "CREATE SEQUENCE s",
    )
    assert write(store, 50) == 2
    assert verified(store) == [1, 2]


def test_a_table_of_any_name_is_not_run(store: Path) -> None:
    target = store.with_name("written.sh")
    name = f"""a" LIMIT 1; COPY (SELECT 'x') TO '{target}' (FORMAT csv); SELECT 1; --"""
    changed(store, 'CREATE TABLE "{}" (x INTEGER)'.format(name.replace('"', '""')))
    assert write(store, 50) == 2
    assert not target.exists()


def test_a_query_reaches_no_other_file(store: Path) -> None:
    with Store.open(store, read_only=True) as opened:
        for query in (
            "SELECT * FROM read_csv('/etc/passwd')",
            f"ATTACH '{store.with_name('x.duckdb')}'",
            f"COPY (SELECT 1) TO '{store.with_name('x.csv')}'",
            "SET enable_external_access = true",
            "SELECT * FROM MODEL",
        ):
            with pytest.raises((BadInput, duckdb.Error)):
                opened.query(query)
    assert sorted(path.name for path in store.parent.iterdir()) == ["moe.duckdb", "secret.csv"]


def test_a_query_without_end_is_stopped(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(store, read_only=True) as opened:
        with (
            monkeypatch.context() as patched,
            pytest.raises(OutOfResources, match="took longer than .* was stopped"),
        ):
            patched.setattr(database, "LONGEST_S", 0.2)
            opened.query(NEVER)
        assert opened.models() == [MODEL]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE runs SET parameters = repeat('[', 5000000)", "a text of 5 MiB in runs"),
        (
            "INSERT INTO runs SELECT r.* REPLACE (range + 9 AS run_id) FROM runs r, range(20000)",
            "runs of .* unpacks",
        ),
        (
            "INSERT INTO splits SELECT 1, 0, 0, 0, 0, 0 FROM range(300000)",
            "splits of .* unpacks to",
        ),
        (
            "INSERT INTO expert_maps SELECT 1, 0, 0, 0, list_resize([0], 900000, 0), []",
            "expert_maps of .* unpacks to",
        ),
    ],
)
def test_a_small_file_is_not_unpacked_without_end(
    store: Path, statement: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "memory_limit", lambda: 1 << 20)
    monkeypatch.setattr(structure, "_UNPACKED", 1)
    monkeypatch.setattr(structure, "_MOST_CONTROL_NBYTES", 1 << 20)
    changed(store, statement)
    with Store.open(store, read_only=True) as opened, pytest.raises(OutOfResources, match=said):
        for query in ("FROM runs", "FROM splits", "FROM expert_maps"):
            opened.query(query)


@pytest.mark.parametrize("name", ["a'b", 'a"b.c', "system", "temp", ":memory:", "s3:x", "main"])
def test_a_store_of_any_name(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(whole)
    assert write(Path(name), 50) == 2
    assert verified(Path(name)) == [1, 2]


def test_every_column_is_known_and_has_a_comment(store: Path) -> None:
    with duckdb.connect(str(store), read_only=True) as connection:
        assert stored_columns(connection) == {
            table: set(each.columns) for table, each in TABLES.items()
        }
        columns = connection.execute(
            "SELECT table_name, column_name, data_type, comment FROM duckdb_columns() WHERE NOT "
            "internal"
        ).fetchall()
        tables = connection.execute("SELECT table_name, comment FROM duckdb_tables()").fetchall()
    assert dict(tables) == {table: f"one row per {each.row}" for table, each in TABLES.items()}
    for table, name, kind, comment in columns:
        assert (kind, comment) == (
            TABLES[table].columns[name].type,
            TABLES[table].columns[name].meaning,
        )
        assert comment and comment.isascii()


def test_every_column_has_a_meaning() -> None:
    for name, each in TABLES.items():
        assert each.row and all(
            column.meaning and column.type for column in each.columns.values()
        ), name

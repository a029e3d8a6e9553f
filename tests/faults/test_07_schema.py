"""A store of another version, and a migration that is stopped.

`tests/data/schema-N.sql` is what the last moectl of schema N made, so that no later one forgets it.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from artifacts.errors import Incompatible
from artifacts.hardware.profile import from_rows, to_rows
from artifacts.quantisation.widths import MADE_WIDTHS
from artifacts.store.check import check_store
from artifacts.store.schema import SCHEMA_VERSION
from artifacts.store.store import Store
from moectl.cli import main
from moectl.shared.exit_codes import INCOMPATIBLE
from tests import DATA
from tests.helpers.measured import made
from tests.helpers.stores import activations, run_info, said_by, verified, write

OLDER = sorted(int(path.stem.partition("-")[2]) for path in DATA.glob("schema-*.sql"))

Older = Callable[[int], Path]


@pytest.fixture
def older(path: Path) -> Older:
    """A store of an older schema with one run, as that version of moectl wrote it."""

    def make(version: int) -> Path:
        write(new := path.with_name("new.duckdb"), 1000)
        with duckdb.connect(str(path)) as connection:
            connection.execute((DATA / f"schema-{version}.sql").read_text())
            connection.execute(f"ATTACH '{new}' AS new (READ_ONLY)")
            for table in ("models", "runs", "activations"):
                connection.execute(f"INSERT INTO {table} BY NAME FROM new.{table}")
            connection.execute(
                "INSERT INTO schema_version VALUES (?, TIMESTAMP '2026-11-20', '0.1')", [version]
            )
        new.unlink()
        return path

    return make


def columns(path: Path) -> set[tuple]:
    with duckdb.connect(str(path), read_only=True) as connection:
        select = (
            "SELECT table_name, column_name, data_type, is_nullable FROM duckdb_columns() WHERE "
            "NOT internal"
        )
        return set(connection.execute(select).fetchall())


def test_a_newer_schema_is_refused(filled: Path) -> None:
    with duckdb.connect(str(filled)) as connection:
        connection.execute("INSERT INTO schema_version VALUES (99, TIMESTAMP '2030-01-01', '9.0')")
    for read_only in (False, True):
        with pytest.raises(
            Incompatible,
            match=f"newer moectl .schema 99, this one knows {SCHEMA_VERSION}.; upgrade",
        ):
            Store.open(filled, read_only=read_only)
    assert main(["inspect", "--store", str(filled)]) == INCOMPATIBLE


@pytest.mark.parametrize("version", OLDER)
def test_an_older_store_is_brought_up_to_date_after_a_copy(
    older: Older, version: int, filled: Path
) -> None:
    fresh = columns(filled)
    filled.unlink()
    store = older(version)
    assert write(store) == 2
    assert columns(store) == fresh
    assert verified(store) == [1, 2]
    with Store.open(store, read_only=True) as opened:
        assert opened.read("activations", 1).equals(activations(1000))
        assert check_store(opened).findings == ()
    copy = store.with_name(f"{store.name}.v{version}")
    with duckdb.connect(str(copy), read_only=True) as connection:
        assert connection.execute("SELECT max(version) FROM schema_version").fetchall() == [
            (version,)
        ]
        assert connection.execute("SELECT count(*) FROM activations").fetchall() == [(1000,)]


def test_every_released_schema_is_tried() -> None:
    assert list(range(1, SCHEMA_VERSION)) == OLDER


def test_another_width_of_replicas_is_another_schema() -> None:
    """Code that does not know a width calls a store that has it damaged, so its schema must be
    refused before."""
    since = {1: (1, 2, 3, 4), 4: (1, 2, 3, 4, 8), 5: (0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 8)}
    assert since[max(since)] == MADE_WIDTHS and max(since) <= SCHEMA_VERSION


def test_a_profile_of_the_second_version_is_read_and_brought_up_to_date(older: Older) -> None:
    profile = made()
    before = replace(
        profile, loads=tuple(replace(load, host=None, latency=None) for load in profile.loads)
    )
    path = older(2)
    with duckdb.connect(str(path)) as connection:
        rows = to_rows(before)
        rows = rows.select(
            [name for name in rows.column_names if not name.startswith(("host", "latency"))]
        )
        connection.execute("INSERT INTO hardware BY NAME SELECT 1 AS run_id, * FROM rows")
        contents = json.dumps({"hardware": {"num_rows": rows.num_rows, "nbytes": 1}})
        connection.execute("UPDATE runs SET contents = ?", [contents])
    with Store.open(path) as store:
        again = store.write_run(run_info(), {"hardware": to_rows(profile)})
        assert from_rows(store.read("hardware", again), profile.conditions) == profile
        assert from_rows(store.read("hardware", 1), profile.conditions) == before


@pytest.mark.parametrize("version", OLDER)
def test_reading_leaves_an_older_store_as_it_is(older: Older, version: int) -> None:
    store = older(version)
    before = store.read_bytes()
    assert verified(store) == [1]
    with Store.open(store, read_only=True) as opened:
        assert check_store(opened).findings == ()
    assert store.read_bytes() == before and [*store.parent.iterdir()] == [store]


def without(path: Path, *changes: str) -> None:
    with duckdb.connect(str(path)) as connection:
        for change in changes:
            connection.execute(change)


def test_a_store_from_between_two_releases_is_completed(older: Older) -> None:
    """A store that has some tables of the next version already but lacks earlier columns."""
    store = older(2)
    without(
        store,
        "DROP TABLE expert_maps",
        "ALTER TABLE traces DROP COLUMN predicted",
        "CREATE TABLE bench_layers (run_id INTEGER NOT NULL, layer USMALLINT NOT NULL)",
    )
    assert write(store) == 2
    with Store.open(store, read_only=True) as opened:
        assert check_store(opened).findings == ()


@pytest.mark.parametrize("version", [2, SCHEMA_VERSION])
def test_what_cannot_be_completed_is_refused_and_left_alone(
    older: Older, filled: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    store = filled
    if version == 2:
        filled.unlink()
        store = older(2)
    without(store, "ALTER TABLE activations DROP COLUMN weight")
    with pytest.raises(
        Incompatible, match=f"between two releases .schema {version}.: activations lacks weight"
    ):
        Store.open(store)
    assert main(["build-buddies", "--store", str(store)]) in (3, INCOMPATIBLE)
    said = capsys.readouterr().err
    assert said.startswith("moectl: ") and said.count("\n") == 1
    with duckdb.connect(str(store), read_only=True) as connection:
        [(found,)] = connection.execute("SELECT max(version) FROM schema_version").fetchall()
    assert found == version and verified_counts(store) > 0


def verified_counts(path: Path) -> int:
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute("SELECT count(*) FROM activations").fetchall()[0][0]


def test_a_table_that_is_gone_is_told(filled: Path) -> None:
    without(filled, "DROP TABLE activations")
    with Store.open(filled, read_only=True) as store:
        with pytest.raises(Incompatible, match="lacks activations, which this moectl knows"):
            store.read("activations", 1)
        told = [found.says for found in check_store(store).findings]
    assert "it wrote 20000 rows of activations and 0 are there" in told


def test_a_migration_that_fails_changes_nothing(
    older: Older, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = older(1)
    steps = ["CREATE TABLE a (i INTEGER)", "CREATE nonsense"]
    monkeypatch.setattr("artifacts.store.file.migration", lambda have: steps)
    with pytest.raises(duckdb.ProgrammingError):
        Store.open(store)
    with duckdb.connect(str(store)) as connection:
        assert connection.execute("SELECT max(version) FROM schema_version").fetchall() == [(1,)]
        assert ("a",) not in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()


KILLED_AT = """
import artifacts.store.file as inner
def die():
    os.kill(os.getpid(), 9)
for name in ("_keep_copy", "_upgrade", "_execute"):
    for when in ("before", "after"):
        path = Path(sys.argv[1]) / f"{name}-{when}.duckdb"
        path.write_bytes(Path(sys.argv[2]).read_bytes())
        work = getattr(inner, name)
        setattr(inner, name, (lambda *all: die()) if when == "before" else (lambda *all: (work(*all), die())))
        print(forked(lambda: Store.open(path)), flush=True)
        setattr(inner, name, work)
"""


@pytest.mark.parametrize("version", OLDER[-1:])
def test_killed_at_any_step_it_goes_on(older: Older, version: int, tmp_path: Path) -> None:
    store = older(version)
    (ground := tmp_path / "killed").mkdir()
    assert said_by(KILLED_AT, ground, store).split() == 6 * ["-9"]
    for path in ground.glob("*.duckdb"):
        assert verified(path) == [1]
        copy = path.with_name(f"{path.name}.v{version}")
        assert copy.exists() == (path.stem != "_keep_copy-before")
        assert not copy.exists() or copy.read_bytes() == store.read_bytes(), "a copy is whole"
        assert write(path) == 2

"""A store that is no store, or has lost bytes, or has others than were written.

Every block and many more lengths: the torment `damaged_store`.
"""

import sqlite3
from pathlib import Path

import duckdb
import pytest

from artifacts.errors import BadInput
from artifacts.store.check import check_store
from artifacts.store.store import Store
from moectl.cli import main
from tests.helpers.stores import activations, write

pytestmark = pytest.mark.slow


def sqlite_file(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def foreign_database(path):
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t (x INTEGER)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.touch(), "is not a store"),
        (lambda path: path.write_text("key,value\n1,2\n" * 100), "is not a store"),
        (sqlite_file, "is not a store"),
        (foreign_database, "not a store of moectl"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_foreign_file_is_refused_and_left_alone(path, make, message, read_only):
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(BadInput, match=message) as caught:
        Store.open(path, read_only=read_only)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert len(list(path.parent.iterdir())) == 1


def test_a_missing_store_or_folder_is_said_so(path):
    with pytest.raises(BadInput, match="there is no store"):
        Store.open(path, read_only=True)
    with pytest.raises(BadInput, match="there is no folder"):
        Store.open(path.parent / "none" / "moe.duckdb")
    assert list(path.parent.iterdir()) == []


def test_damage_is_noticed_or_harmless(filled):
    whole = filled.read_bytes()
    middle_of_blocks = range(100, len(whole), 64 * 1024)
    damaged = [whole[:size] for size in range(4096, len(whole), 128 * 1024)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in middle_of_blocks]
    outcomes = set()
    for content in damaged:
        filled.write_bytes(content)
        try:
            with Store.open(filled, read_only=True) as store:
                outcomes.add(store.read("activations", 1).equals(activations(20_000)))
        except BadInput as error:
            assert str(filled) in str(error) and "\n" not in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes
    assert False not in outcomes


def test_a_check_reads_every_block(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also blocks of tables that no command reads: the damage is a finding of its table, with exit
    code 3."""
    write(filled, 30_000)
    whole = filled.read_bytes()
    codes = set()
    for at in range(3 * 4096 + 5000, len(whole), 256 * 1024):
        filled.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        code = main(["inspect", "store", "--verify", "--store", str(filled)])
        said = capsys.readouterr()
        codes.add(code)
        assert code == 0 or "is damaged" in said.out + said.err
    assert 3 in codes and codes <= {0, 3}


def test_a_check_of_a_whole_store_finds_nothing(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "store", "--verify", "--store", str(filled)]) == 0
    assert (
        "1 runs, 20,000 rows and 0 replica files were read: no findings" in capsys.readouterr().out
    )


def test_rows_of_nobody_are_told(filled: Path) -> None:
    with duckdb.connect(str(filled)) as connection:
        connection.execute(
            "INSERT INTO activations SELECT 9, * EXCLUDE (run_id) FROM activations LIMIT 5"
        )
        connection.execute("DELETE FROM models")
    with Store.open(filled, read_only=True) as store:
        told = [
            f"{found.about}: {found.says}" for found in check_store(store).findings if found.is_loss
        ]
    assert told == [
        "activations: 5 rows are of run 9, which is not there",
        "run 1: its model aaaaaaaaaaaaaaaa is not in the store",
    ]

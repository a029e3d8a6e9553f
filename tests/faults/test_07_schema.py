"""A store of another version, and one that lacks tables or columns."""

from pathlib import Path

import duckdb
import pytest

from artifacts.errors import Incompatible
from artifacts.quantisation.widths import MADE_WIDTHS
from artifacts.store.check import check_store
from artifacts.store.schema import SCHEMA_VERSION
from artifacts.store.store import Store
from moectl.cli import main
from moectl.shared.terminal.exit_codes import INCOMPATIBLE


def changed(path: Path, *statements: str) -> bytes:
    with duckdb.connect(str(path)) as connection:
        for statement in statements:
            connection.execute(statement)
    return path.read_bytes()


@pytest.mark.parametrize(
    "version, age, remedy",
    [(99, "a newer", "upgrade moectl"), (SCHEMA_VERSION - 1, "an older", "name another store")],
)
def test_another_schema_is_refused_and_left_alone(
    filled: Path, version: int, age: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = changed(filled, f"UPDATE schema_version SET version = {version}")
    told = f"by {age} moectl .schema {version}, this one knows {SCHEMA_VERSION}.; {remedy}"
    for read_only in (False, True):
        with pytest.raises(Incompatible, match=told):
            Store.open(filled, read_only=read_only)
    assert main(["inspect", "--store", str(filled)]) == INCOMPATIBLE
    said = capsys.readouterr().err
    assert said.startswith("moectl: ") and said.count("\n") == 1
    assert filled.read_bytes() == before and [*filled.parent.iterdir()] == [filled]


def test_another_width_of_replicas_is_another_schema() -> None:
    """Code that does not know a width calls a store that has it damaged, so its schema must be
    refused before."""
    since = {1: (1, 2, 3, 4), 4: (1, 2, 3, 4, 8), 5: (0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 8)}
    assert since[max(since)] == MADE_WIDTHS and max(since) <= SCHEMA_VERSION


@pytest.mark.parametrize(
    "change, missing",
    [
        ("ALTER TABLE activations DROP COLUMN weight", "activations.weight"),
        ("DROP TABLE expert_maps", "expert_maps"),
    ],
)
def test_a_store_that_lacks_something_is_not_written_to(
    filled: Path, change: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = changed(filled, change)
    with pytest.raises(Incompatible, match=f"lacks {missing}: nothing is written into it"):
        Store.open(filled)
    assert main(["build-buddies", "--store", str(filled)]) in (3, INCOMPATIBLE)
    said = capsys.readouterr().err
    assert said.startswith("moectl: ") and said.count("\n") == 1
    assert filled.read_bytes() == before


def test_a_table_that_is_gone_is_told(filled: Path) -> None:
    changed(filled, "DROP TABLE activations")
    with Store.open(filled, read_only=True) as store:
        with pytest.raises(Incompatible, match="lacks activations: it is damaged"):
            store.read("activations", 1)
        told = [found.says for found in check_store(store).findings]
    assert "it wrote 20000 rows of activations and 0 are there" in told

"""The page on the store lists every table and column that the schema has."""

from artifacts.store.schema import TABLES
from tests import ROOT
from tools.docs.tables import written_into


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")
    assert written_into(page) == page, "python -m tools.docs.tables --write docs/profile.md"


def test_every_column_has_a_meaning() -> None:
    for name, each in TABLES.items():
        assert each.row and all(
            column.meaning and column.type for column in each.columns.values()
        ), name

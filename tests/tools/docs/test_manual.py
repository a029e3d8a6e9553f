"""The manual is short enough to be read: README and docs/*.md, without the lab notebook."""

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CELL = re.compile(r" \| |^\| | \|$")
ADDRESS = re.compile(r"\]\([^)]*\)")


def words(text: str) -> int:
    """Return how many words a text has; signs alone, as the borders of a table, are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_it_has_at_most_16_pages_of_32_000_words_together() -> None:
    told = {page.stem: words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert len(told) <= 16, sorted(told)
    assert sum(told.values()) <= 32_000, told


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in PAGES[1:] if f" {page.name}\n" not in navigation] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_cell_of_a_table_has_at_most_25_words(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    cells = [cell for line in lines if line[:1] == "|" for cell in CELL.split(line)]
    assert [cell for cell in cells if words(ADDRESS.sub("]", cell)) > 25] == []

"""docs/models.md says which families open."""

from tests import ROOT
from tools.docs import models


def test_the_lists_of_the_page_are_those_of_the_tables() -> None:
    """Else: `python -m tools.docs.models --write docs/models.md`."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert models.written_into(page) == page

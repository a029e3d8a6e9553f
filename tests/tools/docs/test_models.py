"""docs/models.md says which families open."""

from tests import ROOT
from tools.docs import models


def test_the_page_is_that_of_the_tables() -> None:
    """Else: `python -m tools.docs.models --write docs/models.md`."""
    assert models.page() == (ROOT / "docs" / "models.md").read_text(encoding="utf-8")

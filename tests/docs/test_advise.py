"""`docs/advise.md` has what `moectl advise` prints, under each command."""

import re
import shlex

import pytest

from moectl.cli import main
from tests import ROOT

PAGE = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\nmoectl (advise .*)\n```\n\n```text\n((?:.+\n)*)```", PAGE)


@pytest.mark.parametrize(("line", "text"), SHOWN)
def test_what_the_page_shows_is_printed(
    line: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == 0
    assert capfd.readouterr().out == text

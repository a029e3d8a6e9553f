"""The commands that the documents show, block by block.

A block marked `sh` is run by the tests, on less text. One marked `console`, its commands after `$
`, takes too long for them: `python -m tools.docs.walk` runs it as it stands and writes below it
when it did. Blocks with another mark are no commands.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT

_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_PROMPT = "$ "
OF_A_CLONE = re.compile(r"\bpython (-m tools\.|tools/)")  # what a reader types in a clone
# below a long block
STAMP = re.compile(r"\n\*(Run as shown on \d{4}-\d\d-\d\d, in .+|Not run as shown yet: .+)\.\*\n")


@dataclass(frozen=True, slots=True)
class Block:
    """The commands of one block. `end` is where it ends in the page's text, in characters."""

    page: Path
    takes_long: bool
    commands: tuple[str, ...]
    end: int


def pages() -> list[Path]:
    """Return README and the pages that show commands, by name."""
    return [
        path
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        if blocks(path)
    ]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, one[1] == "console", _commands(one[1], one[2]), one.end()) for one in found]


def _commands(mark: str, text: str) -> tuple[str, ...]:
    lines = [line for line in text.splitlines() if line.strip()]
    if mark == "console":
        return tuple(line.removeprefix(_PROMPT) for line in lines if line.startswith(_PROMPT))
    return tuple(line for line in lines if not line.startswith("#"))

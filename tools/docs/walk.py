"""Run the commands of the documents that take long for tests, as they stand, and write below each
block when it was.

python -m tools.docs.walk              every block marked `console`, some hours of them
python -m tools.docs.walk tune report  those of these pages

A page has a folder of its own, with moectl as it is installed and nothing on the path. It is empty,
or for a page that shows `python -m tools...` a clone of what is committed, so that nothing is
written to these pages but the date. A line that fails ends the walk.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from tools import ROOT
from tools.arguments import parser_of
from tools.docs.commands import OF_A_CLONE, STAMP, Block, blocks, pages


def walk(page: Path, folder: Path) -> None:
    """Run the long blocks of a page in `folder`, and write the date and the time taken below each.

    Raises SystemExit with what a command said if it fails.
    """
    for number in range(len(blocks(page))):
        block = blocks(page)[number]  # of the page as it is now: each date moves what follows
        if block.takes_long:
            began = time.monotonic()
            for line in block.commands:
                _run(line, folder)
            _stamp(block, time.monotonic() - began)


def _run(line: str, folder: Path) -> None:
    print(f"{folder.name}$ {line}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "MOECTL_STORE")
    }
    environment |= {"PATH": path, "XDG_DATA_HOME": str(folder / ".data")}
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{line}: exit code {done.returncode}")


def _make(folder: Path, commands: Iterable[str]) -> None:
    if any(OF_A_CLONE.search(line) for line in commands):
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
    else:
        folder.mkdir()


def _stamp(block: Block, seconds: float) -> None:
    text = block.page.read_text(encoding="utf-8")
    after = (
        STAMP.sub("", text[block.end :], count=1)
        if STAMP.match(text[block.end :])
        else text[block.end :]
    )
    took = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    stamp = f"\n*Run as shown on {datetime.now(UTC):%Y-%m-%d}, in {took}.*\n"
    block.page.write_text(text[: block.end] + stamp + after, encoding="utf-8")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="names of pages, as tune; all without one"
    )
    named = parser.parse_args().pages
    with tempfile.TemporaryDirectory() as scratch:
        for page in pages():
            if not named or page.stem in named:
                folder = Path(scratch) / page.stem
                _make(
                    folder,
                    [line for block in blocks(page) if block.takes_long for line in block.commands],
                )
                walk(page, folder)


if __name__ == "__main__":
    main()

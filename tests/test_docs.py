"""Every command that the documents show runs, in the order shown, as a reader would type them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if BLOCK.search(path.read_text()))
SET_UP = ("git clone", "cd ", "make ")  # what a test cannot do from inside itself; CI does it before


def commands(page: Path) -> list[str]:
    lines = [line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("MOECTL_STORE", None)
    for line in commands(page):
        if line.startswith(SET_UP):
            continue
        line = re.sub(r"(^|\| )moectl ", rf"\1{shlex.quote(sys.executable)} -m moectl ", line)
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip(), f"{line} printed nothing"


def test_the_documents_are_found() -> None:
    assert {"README", "running", "profile"} <= {page.stem for page in PAGES}

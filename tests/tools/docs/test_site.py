"""The documents as a site: it builds with every link right, and its made pages are up to date."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from moectl.cli import app
from tests import ROOT
from tools.docs import site

pytestmark = pytest.mark.slow


def test_it_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # as README says, and not `python -m`, which has this folder
    program = Path(sys.executable).with_name("mkdocs")
    command = [program, "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {
        path.relative_to(tmp_path).with_suffix(".md").as_posix()
        for path in tmp_path.rglob("*.html")
    }
    assert set(site.pages()) < made, "a page that nobody links is an error of a strict build"
    assert "https://fonts" not in (tmp_path / "index.html").read_text(), "it works offline"
    assert "assets/site.css" in (tmp_path / "index.html").read_text()


def test_every_option_of_every_command_is_told() -> None:
    pages = site.pages()
    for name, command in get_command(app).commands.items():
        page = pages[f"commands/{name}.md"]
        assert all(
            option in page
            for one in command.params
            for option in getattr(one, "opts", ())
            if option[:2] == "--"
        )
    assert "leave one core to the link. | all cores but one |" in pages["commands/run.md"], (
        "not of this machine"
    )
    assert "| `seconds` | `DOUBLE` |  | how long it took, s |" in pages["schema.md"]

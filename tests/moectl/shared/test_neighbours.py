"""Another distribution's `artifacts` beside ours: one line says so, whether it hides ours or has
overwritten files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moectl.commands.start.doctor.findings import of_installation
from moectl.shared.terminal import neighbours
from tests import ROOT


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with our four packages, of which `artifacts` is a copy."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in ("moectl", "runtime", "profilers"):
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    shutil.copytree(
        ROOT / "artifacts", folder / "artifacts", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def started(folder: Path, *before: Path) -> subprocess.CompletedProcess[str]:
    """`moectl --version` with the packages of `folder`, and other folders that Python searches
    before it."""
    path = os.pathsep.join(map(str, [*before, folder]))
    command = [sys.executable, "-P", "-m", "moectl", "--version"]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )


def owned_by_another(folder: Path) -> None:
    """A distribution whose top-level package is `artifacts`, as pip writes its metadata."""
    about = folder / "forensics-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: forensics\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("artifacts\n")
    (about / "RECORD").write_text("artifacts/__init__.py,,\n")


def test_ours_are_ours(site: Path) -> None:
    assert neighbours.foreign() is None
    assert started(site).returncode == 0


def test_windows_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="5"):
        neighbours.refuse_surroundings()
    [line] = capsys.readouterr().err.splitlines()
    assert "WSL" in line


def test_another_package_before_ours_is_named_with_its_owner(site: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    (before / "artifacts").mkdir(parents=True)
    (before / "artifacts" / "__init__.py").touch()
    owned_by_another(before)
    done = started(site, before)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        f"moectl: the package artifacts that Python finds ({before}/artifacts/__init__.py) is "
        "that of forensics 1.0, not moectl's: install moectl in a virtual environment of its "
        "own\n"
    )


def test_files_of_ours_that_another_has_overwritten_are_told(site: Path) -> None:
    (site / "artifacts" / "errors.py").write_text("class Error(Exception): pass\n")
    owned_by_another(site)
    done = started(site)
    assert (done.returncode, done.stdout) == (5, "")
    [said] = done.stderr.splitlines()
    assert said.startswith(
        f"moectl: files of the package artifacts in {site} are those of forensics 1.0, "
    )


def test_a_name_that_is_shared_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned_by_another(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert neighbours.sharing() == {"artifacts": ["forensics 1.0"]}
    [finding] = [each for each in of_installation() if each.topic == "package artifacts"]
    assert (
        finding.says == "forensics 1.0 owns files under this name too"
        and finding.remedy == neighbours.REMEDY
    )

"""A release as a packager makes it: built by `python -m build` at a tag, checked by twine, installed
into a fresh environment, where it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.test_wheel import PACKAGES

pytestmark = pytest.mark.slow

FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "hashes.txt")
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]


def run(*command: object, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | more, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel that is built of it, at a tag of its own."""
    folder = tmp_path_factory.mktemp("release")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "SECURITY.md"):
        shutil.copy(ROOT / name, folder)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v9.8.7"]):
        run(*GIT, *arguments, cwd=folder)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=folder)
    return folder / "dist"


def test_the_version_is_the_tags(built: Path) -> None:
    files = {"moectl-9.8.7-py3-none-any.whl", "moectl-9.8.7.tar.gz"}
    assert {path.name for path in built.iterdir()} == files


def test_an_index_takes_it(built: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_the_wheel_runs_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """With the dependencies of this one, whose gigabytes are not installed again."""
    run(sys.executable, "-m", "venv", "--without-pip", "fresh", cwd=tmp_path)
    fresh = tmp_path / "fresh"
    [packages] = fresh.glob("lib/python*/site-packages")
    [wheel] = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", fresh)
    run(*pip, "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    moectl = fresh / "bin" / "moectl"
    alone = {"PYTHONPATH": "", "XDG_DATA_HOME": str(tmp_path / "data")}
    assert run(moectl, "--version", cwd=tmp_path, **alone) == "moectl 9.8.7\n"
    shown = "import moectl; print(moectl.__file__)"
    python = fresh / "bin" / "python"
    assert run(python, "-c", shown, cwd=tmp_path, **alone).startswith(str(packages))
    few = ("--greedy", "-n", "8", "--experts", "exact", "--preset", "on-demand")  # none compiled
    assert run(moectl, "run", "-p", "Return the number of", *few, cwd=tmp_path, **alone).strip()

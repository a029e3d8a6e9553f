"""What `pip install` brings: four packages whole, the bundled model among them, in less than 15
MB."""

import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests import ROOT

PACKAGES = ("artifacts", "runtime", "profilers", "moectl")
BUILD = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built of a copy, as building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "built"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    with ZipFile(folder / "built" / done.stdout.split()[-1]) as wheel:
        yield wheel


def test_it_is_small(wheel: ZipFile) -> None:
    assert Path(wheel.filename).stat().st_size < 15e6


def test_it_has_every_file_of_the_packages_and_no_other(wheel: ZipFile) -> None:
    sources = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    expected = {
        path.relative_to(ROOT).as_posix() for path in sources if "__pycache__" not in path.parts
    }
    assert {
        "moectl/demo/model.safetensors",
        "runtime/policies/presets.toml",
        "profilers/py.typed",
    } <= expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_nothing_in_it_runs_when_it_is_installed(wheel: ZipFile) -> None:
    """No .pth, which Python runs as it starts, no scripts but the entry point, nothing compiled or
    executable."""
    files = [each for each in wheel.infolist() if not each.is_dir()]
    own = {each.filename.partition("/")[2] for each in files if ".dist-info/" in each.filename}
    licences = {"licenses/LICENSE", "licenses/moectl/traces/LICENSE.Apache-2.0"}
    assert own - licences == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt"}
    assert licences <= own
    assert {
        each.filename.split("/")[0] for each in files if ".dist-info/" not in each.filename
    } == {*PACKAGES}
    suffixes = {Path(each.filename).suffix for each in files}
    assert not suffixes & {".pth", ".pyc", ".so", ".pyd", ".dll", ".exe", ".sh"}
    assert not [each.filename for each in files if each.external_attr >> 16 & 0o111]
    [about] = [name for name in wheel.namelist() if name.endswith("/WHEEL")]
    assert "Root-Is-Purelib: true" in wheel.read(about).decode()


def test_building_it_runs_no_code_of_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["build-system"] == {
        "requires": ["setuptools>=77", "setuptools-scm>=9"],
        "build-backend": "setuptools.build_meta",
    }
    assert (
        project["tool"]["setuptools"].keys() == {"packages", "package-data"}
        and project["project"]["dynamic"] == ["version"]  # which setuptools-scm reads from the tag
        and project["tool"]["setuptools_scm"].keys() == {"fallback_version"}
    )
    assert not [name for name in ("setup.py", "setup.cfg") if (ROOT / name).exists()]


def test_it_says_what_it_is(wheel: ZipFile) -> None:
    [path] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    told = Parser().parsestr(wheel.read(path).decode())
    assert told["Version"] == "0.1.0"  # of a folder without git
    assert told["Name"] == "moectl" and told["Requires-Python"] == ">=3.11" and told["Summary"]
    assert "Mixture-of-Experts" in told.get_payload() and "Typing :: Typed" in told.get_all(
        "Classifier"
    )
    [path] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert wheel.read(path).decode().split() == [
        "[console_scripts]",
        "moectl",
        "=",
        "moectl.cli:main",
    ]

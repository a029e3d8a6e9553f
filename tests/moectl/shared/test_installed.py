"""What a stranger's machine lacks of moectl's own needs is told in a line, with the command that
mends it."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from artifacts.errors import Incompatible
from artifacts.shape import Shape
from moectl.cli import main
from moectl.commands.start.doctor import findings as findings
from moectl.shared import installed
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(autouse=True)
def as_the_project_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was installed some time ago may have needed something else."""
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"]]
    for name, wanted in extras.items():
        texts += [f'{one}{" and" if ";" in one else ";"} extra == "{name}"' for one in wanted]
    monkeypatch.setattr(metadata, "requires", lambda name: texts)


def test_everything_is_here() -> None:
    installed.check()
    assert {need.name for need in installed.needs()} >= {
        "torch",
        "transformers",
        "duckdb",
        "packaging",
    }
    serve = [need.name for need in installed.needs("serve")]
    assert serve == ["fastapi", "llguidance", "uvicorn", "prometheus_client"]
    first = findings.of_installation()[0]
    assert (
        first.topic == "installation"
        and f"torch {metadata.version('torch')}" in first.says
        and not first.remedy
    )


def test_every_extra_has_its_line_and_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.EXTRAS.keys() == PROJECT["optional-dependencies"].keys() - {
        "test",
        "docs",
        "mutation",
    }
    _lacking(monkeypatch, "uvicorn", None)
    serve = next(found for found in findings.of_installation() if found.topic == "extra serve")
    assert serve.says.startswith("for moectl serve: fastapi ") and (
        ", uvicorn is missing, " in serve.says
    )
    assert serve.remedy == "pip install 'moectl[serve]'"


def test_a_version_that_will_not_do_is_told_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _lacking(monkeypatch, "transformers", "4.57.1")
    _lacking(monkeypatch, "duckdb", None)
    assert main(["doctor"]) == 5
    said = capsys.readouterr().err
    assert said == (
        "moectl: transformers 4.57.1 is not <6,>=5.23, duckdb is missing: "
        "pip install 'transformers<6,>=5.23' 'duckdb<3,>=2.0'\n"
    )
    with pytest.raises(Incompatible):
        installed.check()


def test_without_torch_a_command_says_where_to_look() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom moectl.cli import main\n"
        "sys.exit(main(['run', '--prompt', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]  # transformers has said something too
    assert (done.returncode, said) == (
        5,
        "moectl: torch is not installed: `moectl doctor` says what is missing",
    )


def test_sources_that_were_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    installed.check()
    [found] = findings.of_installation()
    assert "runs from its sources" in found.says and found.remedy


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is not there yet, in a folder that is not."""
    store = tmp_path / "new" / "moe.duckdb"
    small = Shape(2, 8, 2, expert_nbytes=1 << 20)
    large = Shape(60, 256, 8, expert_nbytes=1 << 40)
    assert findings.of_room(store, small, weight_nbytes=2).remedy is None
    found = findings.of_room(store, large, weight_nbytes=2)
    assert (
        "1 to 4 bits take 1" in found.says
        and "PiB" not in found.says
        and "fewer widths" in found.remedy
    )


def _lacking(monkeypatch: pytest.MonkeyPatch, package: str, found: str | None) -> None:
    """As if another version of it, or none, were installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name == package and found is None:
            raise metadata.PackageNotFoundError(name)
        return found if name == package else real(name)

    monkeypatch.setattr(metadata, "version", version)

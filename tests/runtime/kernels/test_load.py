"""Kernels for GPUs ask for a Triton that compiles them."""

import tomllib
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from artifacts.errors import Incompatible
from runtime.kernels import load
from runtime.kernels.load import OLDEST_TRITON
from tests import ROOT


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A triton whose version the test sets, in place of the one that may be here."""
    triton = SimpleNamespace(__version__="")
    monkeypatch.setattr(load, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(load, "import_module", lambda name: triton)
    return triton


@pytest.mark.parametrize("version", [OLDEST_TRITON, "3.6.0", "3.7.1", "3.10.0+git5e5e", "4.0.0"])
def test_the_oldest_triton_and_newer_ones_will_do(installed: SimpleNamespace, version: str) -> None:
    installed.__version__ = version
    assert load.has_triton.__wrapped__()


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1", "3.5.1+git5e5e"])
def test_an_older_triton_is_refused_in_one_line(installed: SimpleNamespace, version: str) -> None:
    installed.__version__ = version
    with pytest.raises(Incompatible) as refused:
        load.has_triton.__wrapped__()
    line = str(refused.value)
    assert (
        line.startswith(f"triton {version} is older than {OLDEST_TRITON}") and "pip install" in line
    )
    assert "\n" not in line


def test_without_triton_there_are_no_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    assert not load.has_triton.__wrapped__()


def test_the_package_names_the_same_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(line) for line in project["optional-dependencies"]["test"]]
    (triton,) = (one for one in asked if one.name == "triton")
    assert str(triton.specifier) == f">={OLDEST_TRITON}"

"""What a packager, a contributor and a citing author find agrees: version, licence, packages, paths."""

import re
import tomllib

import pytest
import yaml

from tests import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
VERSION = PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]  # else it is the tag's
CONDA_NAMES = {"torch": "pytorch", "huggingface-hub": "huggingface_hub", "duckdb": "python-duckdb"}
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
YAML = [
    ROOT / "CITATION.cff",
    ROOT / "packaging" / "recipe.yaml",
    *sorted((ROOT / ".github").rglob("*.yml")),
]


def test_version_and_licence_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8"))
    assert citation["version"] == recipe["context"]["version"] == VERSION
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    builds = PYPROJECT["build-system"]["requires"]
    assert {need.replace(">", " >") for need in builds} <= {*recipe["requirements"]["host"]}
    assert PROJECT["license"] == citation["license"] == recipe["about"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_conda_wants_what_pip_wants() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8"))
    wanted = {f"python {PROJECT['requires-python']}"}
    for need in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", need).groups()
        wanted.add(f"{CONDA_NAMES.get(name, name)} {bounds}")
    assert set(recipe["requirements"]["run"]) == wanted


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_workflows_call_what_is_there(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= targets
    extras = {name for each in re.findall(r"\.\[([\w,]+)\]", text) for name in each.split(",")}
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_the_image_copies_what_the_build_wants() -> None:
    lines = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert {"artifacts", "runtime", "profilers", "moectl", "LICENSE"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    [install] = [line for line in lines if "uv pip install" in line]
    assert "-c constraints.txt" in install and "'.[serve]'" in install


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_first_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8"))
    ours = [link for link in links if "://" not in link]
    assert ours
    assert [link for link in ours if not (ROOT / link).exists()] == []

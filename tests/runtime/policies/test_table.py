"""The name table, the texts of policies, the presets, and what policies may import."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runtime.policies as policies
from artifacts.errors import BadUsage, Incompatible
from runtime.policies import POLICIES, describe, parse
from runtime.policies.base import Artefacts
from runtime.policies.presets import preset, presets
from tests import ROOT

EVERY = [(axis, name) for axis, table in POLICIES.items() for name in table]


@pytest.mark.parametrize(("axis", "name"), EVERY)
def test_a_policy_is_a_dataclass_whose_fields_have_defaults(axis: str, name: str) -> None:
    policy = parse(axis, name)
    assert dataclasses.is_dataclass(policy)
    assert describe(policy) == name
    assert policy.requires <= {field.name for field in dataclasses.fields(Artefacts)}


def test_parameters_are_typed_and_described_again() -> None:
    buddy = parse("miss", "buddy:rho=2,otherwise=drop,beta=0.5,renormalise=yes")
    assert (buddy.rho, buddy.otherwise, buddy.beta, buddy.renormalise) == (2, "drop", 0.5, True)
    assert parse("miss", describe(buddy)) == buddy
    assert parse("miss", "buddy:rho=None").rho is None


@pytest.mark.parametrize(
    ("axis", "text", "message"),
    [
        ("eviction", "lruu", r"did you mean lru\?"),
        ("eviction", "", "Known: lru, "),
        ("miss", "buddy:rhoo=2", r"did you mean rho\?"),
        ("miss", "buddy:rho=two", "takes a value of type int"),
        ("miss", "drop:renormalise=maybe", "takes a value of type bool"),
        ("miss", "drop:rank=-1", "rank >= 0"),
        ("miss", "buddy:otherwise=panic", "fetch or drop"),
        ("miss", "buddy:stand_in=zeros", r"did you mean zero\?"),
        ("miss", "buddy:quota=2", "quota in 0..1"),
        ("miss", "buddy:keep=1.5", "whole ranks, or below 1 a share"),
        ("miss", "buddy:over=pass", "layer or token, not 'pass'"),
        ("miss", "buddy:metric=loss", "coactivation, or None for the newest"),
        ("prefetch", "next_gate:distance=0", "distance >= 1"),
        ("prefetch", "draft:ahead=0", "ahead >= 1"),
    ],
)
def test_what_is_unknown_is_answered_with_the_known(axis: str, text: str, message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        parse(axis, text)


def test_every_preset_builds_and_names_its_paper() -> None:
    for name, row in presets().items():
        policies.build(row.texts())
        assert row.paper and row.summary and len(row.summary) <= 42
        if row.waits_for:
            with pytest.raises(
                Incompatible, match=f"preset {name} cannot run yet: it waits for .*inspect presets"
            ):
                preset(name)
    with pytest.raises(BadUsage, match=r"did you mean on-demand\?"):
        preset("ondemand")


def test_a_preset_is_named_with_parameters_of_its_policies() -> None:
    changed = preset("buddymoe:rho=3,keep=0.25,overfetch=2")
    assert changed.texts() == preset("buddymoe").texts() | {
        "prefetch": "next_gate:overfetch=2.0",
        "miss": "buddy:keep=0.25,rho=3",
    }
    assert (
        changed.name == "buddymoe:rho=3,keep=0.25,overfetch=2"
        and preset("buddymoe").miss == "buddy:keep=0.5"
    )
    for name, says in (
        ("buddymoe:rh=3", "unknown parameter of buddymoe 'rh'; did you mean rho"),
        ("fmoe:distance=3", "distance is a parameter of several policies"),
        ("buddymoe:rho", "rho takes a value of type int"),
    ):
        with pytest.raises(BadUsage, match=says):
            preset(name)


def test_lossless_presets_are_those_of_lossless_policies() -> None:
    """As their modules say themselves; few bits near their memory are asked for by a parameter."""
    for row in presets().values():
        kinds = (
            POLICIES[axis][getattr(row, axis).partition(":")[0]] for axis in ("routing", "miss")
        )
        is_lossy = any("lossy" in sys.modules[kind.__module__].__doc__ for kind in kinds)
        assert row.is_lossless == (not is_lossy and "avg_bits" not in row.residency), row.name


def test_presets_are_the_mixes_that_specmd_compares() -> None:
    """Table 1 of SpecMD: prefetch, eviction, miss, routing."""
    mixes = {
        "mixtral-offloading": ("next_gate", "lru", "fetch", "standard"),
        "importance": ("score", "score", "substitute", "standard"),
        "hobbit": ("next_gate", "lhu", "cascade", "standard"),
        "mixture-cache": ("none", "lru", "fetch", "cache_aware:keep=1"),
        "specmd": ("score", "least_stale", "fetch", "standard"),
    }
    for name, mix in mixes.items():
        row = presets()[name]
        assert (row.prefetch, row.eviction, row.miss, row.routing) == mix
        assert name == "mixture-cache" or row.differs
    assert presets()["specmd"].scope == "global"


def test_policies_outside_routing_know_only_the_standard_library_and_numpy() -> None:
    """Compiled loops are in modules of their own, imported only once a policy that has some is
    used."""
    allowed = {"numpy", "artifacts", "runtime.policies", *sys.stdlib_module_names}
    folder = Path(policies.__file__).parent
    for path in folder.rglob("*.py"):
        if path.parent.name == "routing" or path == folder / "__init__.py":
            continue
        for name in _imported(path):
            assert any(name == a or name.startswith(f"{a}.") for a in allowed), (
                f"{path.name} imports {name}"
            )


def test_only_policies_with_compiled_loops_import_numba() -> None:
    code = (
        "import sys\n"
        "from artifacts.shape import Shape\n"
        "from runtime.policies import parse\n"
        "from runtime.policies.base import Artefacts\n"
        "shape = Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=1)\n"
        "for name in ('lru', 'horizon'):\n"
        "    parse('eviction', name).prepare(shape, Artefacts())\n"
        "    print(name, 'numba' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "lru False\nhorizon True\n", done.stdout + done.stderr


def _imported(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    return names + [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_every_system_of_the_design_has_a_preset() -> None:
    systems = (
        "full, uniform-bits, on-demand, near, shadow, mixtral-offloading, moe-infinity, "
        "pre-gated, adapmoe, promoe, hobbit, mixture-cache, importance, specmd, buddymoe, "
        "context-aware, monde, monde-static, moepic, fmoe, llama.cpp, freetoken, strata"
    )
    assert [name for name in presets() if name in systems.split(", ")] == systems.split(", ")


@pytest.mark.parametrize(("axis", "name"), EVERY)
def test_every_policy_has_its_paragraph_and_every_parameter_its_default(
    axis: str, name: str
) -> None:
    page = (Path(policies.__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    section = page.split(f"## {axis.capitalize()}\n")[1].split("\n## ")[0]
    paragraph = next(
        (text for text in section.strip().split("\n\n") if text.startswith(f"**`{name}`**")), None
    )
    assert paragraph, f"docs/policies.md says nothing of {axis} {name}"
    shown = re.match(r"\*\*`\w+`\*\*(?:`:(.*?)`)?", paragraph)[1]
    written = parse(axis, f"{name}:{shown}") if shown else None
    named = [option.partition("=")[0] for option in shown.split(",")] if shown else []
    assert named == [field.name for field in dataclasses.fields(POLICIES[axis][name])]
    assert written in (None, parse(axis, name)), "the page shows other defaults"

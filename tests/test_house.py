"""Imports run one way: moectl -> profilers -> runtime -> artifacts."""

import ast
from pathlib import Path

from tests import ROOT

ORDER = ("artifacts", "runtime", "profilers", "moectl")


def test_imports_run_one_way() -> None:
    seen = set()
    for floor, package in enumerate(ORDER):
        for path in (ROOT / package).rglob("*.py"):
            for name in _packages(path) & set(ORDER):
                seen.add((package, name))
                assert ORDER.index(name) <= floor, f"{path.relative_to(ROOT)} imports {name}"
    # The check does see imports:
    assert {("runtime", "artifacts"), ("profilers", "runtime"), ("moectl", "runtime")} <= seen


def _packages(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in plain | named}

"""The session for a machine that one has for minutes, rehearsed on a CPU without packages that such
machines lack."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.model.open import open_model
from runtime.tiers.ram import RamStore
from tests import ROOT
from tools.gpu import models, session, sparse
from tools.gpu.groups import Group, run_groups
from tools.gpu.session import LIMITS_S, markdown, stage

pytestmark = pytest.mark.slow

BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("duckdb", "datasets", "numba"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Absent())
"""
SAYS = """
import sys, time
from tools.gpu.groups import tell
tell(name="first", gbps=2.5)
print("for readers")
if sys.argv[1] == "fails":
    raise SystemExit("no such kernel")
if sys.argv[1] == "hangs":
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    tell(name="child", pid=child.pid)
    child.wait()
tell(name="second", passed=True)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that groups can run."""
    (tmp_path / "says.py").write_text(SAYS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_group_that_fails_or_hangs_costs_itself_only(modules: Path) -> None:
    groups = [
        Group(how, "says", (how,), 20.0 if how != "hangs" else 3.0)
        for how in ("fails", "hangs", "ends")
    ]
    out = modules / "lines.jsonl"
    out.write_text('{"kept": 1}\n')
    lines = run_groups(groups, out, limit_s=60.0)
    assert [json.loads(line) for line in out.read_text().splitlines()[1:]] == lines
    ended = {line["group"]: line["ended"] for line in lines if "ended" in line}
    assert ended["fails"].startswith("exit code 1: ") and ended["fails"].endswith("no such kernel")
    assert ended["hangs"] == "after its limit of 3 s" and ended["ends"] == "well"
    assert [line["group"] for line in lines if line.get("name") == "first"] == [
        "fails",
        "hangs",
        "ends",
    ]
    (child,) = (line["pid"] for line in lines if line.get("name") == "child")
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text(), (
        "what a group has started ends with it"
    )
    table = markdown(1, lines)
    assert "| fails | first | gbps 2.5 |" in table and "| ends | second | passed |" in table


def test_no_group_is_begun_out_of_time(modules: Path) -> None:
    (line,) = run_groups([Group("late", "says", ("ends",))], modules / "lines.jsonl", limit_s=0.0)
    assert line["ended"] == "not begun: out of time"


@pytest.mark.parametrize("number", LIMITS_S)
def test_every_stage_has_time_for_its_groups_and_takes_nine_minutes_at_most(number: int) -> None:
    """The first two, which say what matters most, take five."""
    groups = stage(number, device="cuda", tiny=False)
    assert LIMITS_S[number] <= (300 if number <= 2 else 540)
    assert all(group.limit_s <= LIMITS_S[number] for group in groups)
    assert len({group.name for group in groups}) == len(groups)
    assert sum(group.limit_s for group in groups) <= 1.6 * LIMITS_S[number], (
        "few groups need their whole limit"
    )


def test_it_runs_without_the_network_and_what_machines_for_gpus_lack(tmp_path: Path) -> None:
    """A stage of the bench, on the shape that is never on a disk."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    out = tmp_path / "session.jsonl"
    command = [
        sys.executable,
        "-m",
        "tools.gpu.session",
        "5",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[-1]["ended"] == "well", done.stderr
    rows = [line for line in lines if "ended" not in line]
    assert len(rows) == 4 + 4 + 3 and not any(row["why_not"] for row in rows), rows
    for row in rows:
        assert row["floor_share"] > 0 and (row["tpot_ms"] is None or row["experts"] == "torch")
        assert row["predicted_ms"] or row["tpot_ms"] is None or "perfect" in row["name"]
    assert "share" in done.stdout and (tmp_path / "session.stage5.md").read_text() in done.stdout


def test_a_sparse_checkpoint_takes_no_room_and_its_experts_are_made(tmp_path: Path) -> None:
    shape = models.SHAPES["qwen3-30b-a3b"]
    models.save(shape, tmp_path, layers=3, device="cpu", tiny=True)
    stored = (tmp_path / "model.safetensors").stat()
    opened = open_model(str(tmp_path))
    hole = opened.shape.num_keys * opened.shape.expert_nbytes
    assert stored.st_blocks * 512 < stored.st_size - 0.9 * hole
    made = sparse.with_experts(opened, pin=False)
    one, other = (
        opened.store.layout.views(made.store.view(0, expert))["down_proj"] for expert in (0, 1)
    )
    assert 0.01 < one.float().std() < 0.04 and not torch.equal(one, other)
    assert isinstance(made.store, RamStore) and session.LIMITS_S
    opened.store.close()


def test_what_is_imported_of_transformers_is_in_the_version_beside_a_gpu() -> None:
    """In 5.17, which machines with a GPU have. For a new name look there, then add it to the list;
    import what 5.17 has not in the function that needs it."""
    known = (ROOT / "tests" / "data" / "transformers-5.17.txt").read_text().splitlines()
    rooms = ("artifacts", "runtime", "profilers", "tools/gpu")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    nodes = [node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body]
    asked = [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module.startswith("transformers")
    ]
    names = {f"{node.module}.{alias.name}" for node in asked for alias in node.names}
    assert len(names) > 40 and names <= {*known}


def test_it_needs_nothing_of_the_tests() -> None:
    """A machine with the product and the tools alone runs it: no module that the tools for a GPU
    import, at the top or in a function, asks for `tests`."""
    waiting = [*(ROOT / "tools" / "gpu").rglob("*.py")]
    seen = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names = [*_imported(path)]
        assert not [name for name in names if name.startswith("tests")], path
        files = [
            (ROOT / name.replace(".", "/")).with_suffix(".py")
            for name in names
            if name.startswith("tools.")
        ]
        waiting += [file for file in files if file.exists() and file not in seen]
    assert ROOT / "tools" / "bench" / "decoding" / "resident.py" in seen, (
        "what they import of other tools counts"
    )


def _imported(path: Path) -> Iterator[str]:
    """The names of modules, and of what is taken from them, that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

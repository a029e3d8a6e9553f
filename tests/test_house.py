"""The house stays as docs/architecture.md draws it: imports run one way between packages and
between rooms."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT
from tools.docs import budget
from tools.docs.rooms import (
    ASK_FOR_DEVICES,
    ASKS_FOR_DEVICE,
    DATA,
    MOST_ASK_FOR_THE_HOST,
    PACKAGES,
    ROOMS,
    WITHOUT_TORCH,
    Import,
    imports,
    is_allowed,
    modules,
    purpose,
    room_of,
)


@pytest.fixture(scope="module")
def every_import() -> list[Import]:
    return [
        one
        for package in PACKAGES
        for name, path in modules(package)
        for one in imports(name, path)
    ]


def test_a_package_is_rooms_and_the_few_flat_modules_that_are_named() -> None:
    for package in PACKAGES:
        folders = {
            path.name
            for path in (ROOT / package).iterdir()
            if path.is_dir() and path.name != "__pycache__"
        }
        flat = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "__main__"}
        assert folders - DATA.get(package, set()) | flat == set(ROOMS[package])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_says_what_it_is_for(package: str) -> None:
    assert all(purpose(package, room).endswith(".") for room in ROOMS[package])


def test_imports_run_one_way(every_import: list[Import]) -> None:
    """Between packages and between rooms; imports in functions and for types count as well."""
    forbidden = [
        f"{one.module}:{one.line} imports {one.target}"
        for one in every_import
        if not is_allowed(one)
    ]
    assert not forbidden, "\n".join(forbidden)


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_stand_in_an_order(package: str) -> None:
    """What a room may import stands in the table before it, so that no circle can be allowed."""
    rooms = list(ROOMS[package])
    for place, room in enumerate(rooms):
        assert set(ROOMS[package][room].split()) <= set(rooms[:place]), room


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_one_that_imports_it(package: str, every_import: list[Import]) -> None:
    """However long the circle would be; imports in functions and for types count as well."""
    names = {name for name, _ in modules(package)}
    imported: dict[str, set[str]] = {name: set() for name in names}
    for one in every_import:
        if one.module in names and (target := _module_of(one.target, names)):
            imported[one.module].add(target)
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def _module_of(name: str, names: set[str]) -> str | None:
    """The module among `names` that is `name`, or that defines it."""
    while name not in names and name:
        name = name.rpartition(".")[0]
    return name or None


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_what_decides_imports_no_torch(room: str) -> None:
    """In a fresh process, all modules of the room: a replay decides as a live run does, and needs
    no tensors for it."""
    names = [name for name, _ in modules("runtime") if room_of(name) == ("runtime", room)]
    code = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(names) > 3 and done.stdout == "False\n"


def test_few_files_ask_for_a_device() -> None:
    """Else: ask `runtime.devices`, a link, a tier or a backend; and shorten the list where a file
    no longer asks."""
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for _, path in modules(package)
    }
    found = {name for name, text in texts.items() if ASKS_FOR_DEVICE.search(text)}
    assert sorted(found) == sorted(ASK_FOR_DEVICES)
    asked = [name for name, text in texts.items() if re.search(r"\bis_host\(", text)]
    assert len(set(asked) - {"runtime/devices.py"}) == MOST_ASK_FOR_THE_HOST, asked


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ('if x.device.type != "cpu":', True),
        ('first.type == "cuda"', True),
        ("stored(x).is_cuda", True),
        ("torch.accelerator.synchronize()", True),
        ("event: torch.cuda.Event", True),
        ("is_host(x.device)", False),
        ("from runtime.links.cuda import CudaLink", False),
    ],
)
def test_a_question_for_a_device_is_seen(line: str, asks: bool) -> None:
    assert bool(ASKS_FOR_DEVICE.search(line)) == asks


def test_a_public_class_name_stands_for_one_class() -> None:
    """In all four packages together: a reader who meets `Request` need not ask whose."""
    homes: dict[str, list[str]] = {}
    for name, path in (each for package in PACKAGES for each in modules(package)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert len(homes) > 300 and not shared


def test_no_limit_of_the_budget_is_passed() -> None:
    """Else: make the code smaller, or raise the limit in tools/docs/budget.py and say why."""
    size = budget.measured()
    assert not size.problems()
    assert budget.MOST_TOKENS - size.tokens < 500, "lower MOST_TOKENS: it falls with the code"


def test_code_is_counted_and_each_passed_limit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "house" / "room"
    room.mkdir(parents=True)
    other = tmp_path / "house" / "other"
    other.mkdir()
    (other / "one.py").touch()
    (room / "one.py").write_text('"""A docstring."""\n\na, b = b, a  # they change places\n')
    (room / "two.py").write_text(f"a, b = 1, 2\nc = 3  # {'-' * 100}\n")
    (room / "three.py").write_text("def f(x):\n    return x\n")
    size = budget.measured(tmp_path, ["house"])
    assert (size.tokens, size.nodes, size.packed) == (7 + 7 + 3 + 8, 6, 1 / 3)
    assert size.entries == {"house/other": 1, "house/room": 3}
    for limit in ("MOST_TOKENS", "MOST_NODES", "MOST_PACKED", "MOST_ENTRIES"):
        monkeypatch.setattr(budget, limit, 0)
    monkeypatch.setattr(budget, "MOST_ROOMS", 1)
    assert size.problems() == [
        "house/room/two.py:2 is wider than 100 columns",
        "25 tokens, more than 0",
        "nine functions in ten have 6 nodes, more than 0",
        "33.3% of assignments put a tuple to a tuple",
        "house/other has 1 entries, more than 0",
        "house/room has 3 entries, more than 0",
        "one.py is in more than 1 rooms: house/other, house/room",
    ]

"""The rooms of the four packages, and which rooms each may import: one table for the test, the
picture and the listing.

A room is a folder of a package, or one of the few modules that stand flat beside the folders. What
a room is for stands in the docstring of its `__init__.py`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT

PACKAGES = ("artifacts", "runtime", "profilers", "moectl")
"""Each may import those before it, and none behind it."""

_FACTS = "errors shape common"
_DECIDES = "control policies"
_MOVES = "tiers links kernels model devices"
ROOMS: dict[str, dict[str, str]] = {
    "artifacts": {
        "errors": "",
        "shape": "errors",
        "tables": "errors",
        "common": "errors",
        "formats": _FACTS,
        "modelshapes": f"{_FACTS} formats",
        "hardware": f"{_FACTS} modelshapes formats",
        "traces": _FACTS,
        "importers": f"{_FACTS} traces",
        "routing": _FACTS,
        "quantisation": _FACTS,
        "splits": _FACTS,
        "store": f"{_FACTS} modelshapes hardware traces routing quantisation splits",
    },
    "runtime": {
        "policies": "",
        "control": "policies",
        "replay": _DECIDES,
        "search": f"replay {_DECIDES}",
        "devices": "",
        "model": "devices",
        "links": "model devices control",
        "kernels": "model devices",
        "tiers": f"links kernels model devices {_DECIDES}",
        "backends": f"{_MOVES} control",
        "engine": f"backends {_MOVES} {_DECIDES}",
        "drafters": f"engine {_MOVES} {_DECIDES}",
        "session": f"replay drafters engine backends {_MOVES} {_DECIDES}",
    },
    "profilers": {
        "text": "",
        "workers": "",
        "hardware": "",
        "routing": "text workers",
        "quantise": "text workers",
        "export": "quantise",
        "compare": "export text workers hardware routing",
    },
    "moectl": {
        "bundled": "",
        "shared": "bundled",
        "charts": "",
        "show": "charts shared bundled",
        "cli": "shared bundled",
        "bench": "cli show shared bundled",
        "report": "charts show shared bundled",
        "serving": "show shared bundled",
        "generating": "show shared bundled",
        "tune": "bench show shared bundled",
        "commands": "cli bench tune report serving generating charts show shared bundled",
    },
}
"""By package and room: the rooms of the same package that it may import. A package's own `__init__`
may import any."""

WITHOUT_TORCH = ("policies", "control", "replay", "search")
"""Rooms of `runtime` that decide: they import no torch, neither themselves nor by way of others."""

ASKS_FOR_DEVICE = re.compile(
    r"\bdevice\)?\.type\b|\.is_(cuda|cpu|mps|xpu)\b|\btorch\.(cuda|mps|xpu|accelerator)\b"
    r"|\.type [!=]= \""
)
"""Text that asks for the kind of a device, or calls what only one kind of device has."""

ASK_FOR_DEVICES = (
    "artifacts/formats/numbers.py",
    "runtime/backends/host_copy.py",
    "runtime/backends/streams.py",
    "runtime/devices.py",
    "runtime/links/cuda.py",
    "runtime/links/cuda_events.py",
    "runtime/links/page_lock.py",
)
"""The files that may hold such text: `runtime.devices` answers the others. May only get shorter."""

# two of them since masks and the highest logit of a vocabulary are numpy's where it has the scores
MOST_ASK_FOR_THE_HOST = 23
"""Files that ask `runtime.devices.is_host`, a question that a tier, a link or a backend could often
answer: the number may only fall."""

DATA = {"moectl": {"demo", "traces"}}
"""Folders that are no rooms: `demo` is the bundled checkpoint, `traces` has the bundled traces."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import of our own code: the module that imports, the line, and the module or name that it
    asks for."""

    module: str
    line: int
    target: str


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package by its dotted name, with its file."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


def room_of(name: str) -> tuple[str, str]:
    """Package and room of a module or of a name in one; the package's own `__init__` is the room
    ``""``."""
    package, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    return package, room if room in ROOMS[package] else ""


def imports(name: str, path: Path) -> Iterator[Import]:
    """Every import of our own packages in a file, wherever it stands: at the top, in a function,
    for types only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            asked = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (
            Import(name, node.lineno, each) for each in asked if each.partition(".")[0] in PACKAGES
        )


def is_allowed(one: Import) -> bool:
    """Return whether the importing room may import the other."""
    package, room = room_of(one.module)
    other_package, other = room_of(one.target)
    if package != other_package:
        return PACKAGES.index(other_package) < PACKAGES.index(package)
    return room in ("", other) or other in ROOMS[package][room].split()


def purpose(package: str, room: str) -> str:
    """The first line of the docstring of a room."""
    flat = ROOT / package / f"{room}.py"
    path = flat if flat.is_file() else ROOT / package / room / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text, f"{path} does not say what it is for"
    return text.split("\n\n")[0].replace("\n", " ")

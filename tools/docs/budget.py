"""Size of the code in the four packages, and the limits on it.

Limits fall with the code: a commit that makes the code smaller lowers them, and a commit that
raises one says why.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT
from tools.docs.rooms import PACKAGES

MOST_TOKENS = 649_900
MOST_NODES = 200  # of the syntax tree, in nine functions of ten
MOST_PACKED = 0.015  # of all assignments: a tuple to a tuple, unless values change places
MOST_COLUMNS = 100
MOST_ENTRIES = 15  # modules and folders of a folder
MOST_ROOMS = 3  # of a file name: one that is in more says too little

_NAMELESS = {"__init__.py", "__main__.py"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True, slots=True)
class CodeSize:
    """Counts of the code.

    `tokens` leaves out comments, docstrings and the ends of lines, so that neither explaining code
    nor breaking its lines costs anything. `wide` are lines above the limit, by their place;
    `rooms` are those that have a module of a name.
    """

    tokens: int
    packed: float
    nodes: int
    wide: Sequence[str]
    entries: dict[str, int]
    rooms: dict[str, list[str]]

    def problems(self) -> list[str]:
        """Return a line for each limit that is passed, and for each that could be lower."""
        found = [f"{place} is wider than {MOST_COLUMNS} columns" for place in self.wide]
        if self.tokens > MOST_TOKENS:
            found.append(f"{self.tokens:,} tokens, more than {MOST_TOKENS:,}")
        if self.nodes > MOST_NODES:
            found.append(f"nine functions in ten have {self.nodes} nodes, more than {MOST_NODES}")
        if self.packed > MOST_PACKED:
            found.append(f"{self.packed:.1%} of assignments put a tuple to a tuple")
        for folder, count in self.entries.items():
            if count > MOST_ENTRIES:
                found.append(f"{folder} has {count} entries, more than {MOST_ENTRIES}")
        for name, rooms in self.rooms.items():
            if len(rooms) > MOST_ROOMS:
                found.append(f"{name} is in more than {MOST_ROOMS} rooms: {', '.join(rooms)}")
        return found

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens; 90 % of functions have at most {self.nodes} nodes; "
            f"{self.packed:.1%} of assignments put a tuple to a tuple"
        )


def measured(root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> CodeSize:
    """Count the code of these packages."""
    paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    functions = sorted(
        sum(1 for _ in ast.walk(node)) for node in nodes if isinstance(node, _FUNCTIONS)
    )
    return CodeSize(
        tokens=sum(_tokens(text, trees[name]) for name, text in texts.items()),
        packed=sum(map(_is_packed, assignments)) / max(1, len(assignments)),
        nodes=functions[int(0.9 * len(functions))] if functions else 0,
        wide=[place for name, text in texts.items() for place in _wide(name, text)],
        entries={
            folder.relative_to(root).as_posix(): _entries(folder)
            for folder in sorted({path.parent for path in paths})
        },
        rooms=_rooms(texts),
    )


def _tokens(text: str, tree: ast.AST) -> int:
    docstrings = set(_docstrings(tree))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(1 for one in tokens if one.type not in _UNCOUNTED and one.start not in docstrings)


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node):
            yield node.body[0].lineno, node.body[0].col_offset


def _is_packed(node: ast.Assign) -> bool:
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    return sorted(map(ast.unparse, target.elts)) != sorted(map(ast.unparse, node.value.elts))


def _wide(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MOST_COLUMNS:
            yield f"{name}:{number}"


def _entries(folder: Path) -> int:
    modules = {path.name for path in folder.glob("*.py")} - _NAMELESS
    folders = [path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    return len(modules) + len(folders)


def _rooms(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the rooms that have a file, by its name."""
    found: dict[str, set[str]] = {}
    for path in paths:
        package, room, *_ = path.removesuffix(".py").split("/")
        name = path.rpartition("/")[2]
        if name not in _NAMELESS:
            found.setdefault(name, set()).add(f"{package}/{room}")
    return {name: sorted(rooms) for name, rooms in found.items()}

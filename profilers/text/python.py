"""Text that every CPython ships: the docstrings of its standard library.

Sources are parsed; nothing is imported or executed. The held-out part is fixed by name
(`is_held_out`), so it is the same on every machine and in every version that has the document.
"""

import ast
import os
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from profilers.text.files import Document

# Left out: tests and bundled third parties (no library code), encodings and pydoc_data (tables),
# and modules that not every version has.
SKIPPED = frozenset(
    {
        *(
            "test",
            "tests",
            "idlelib",
            "idle_test",
            "site-packages",
            "dist-packages",
            "lib2to3",
            "ensurepip",
            "turtledemo",
        ),
        *("encodings", "pydoc_data", "distutils", "__phello__", "__pycache__"),
    }
)
SCOPES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def is_held_out(name: str) -> bool:
    """Return whether a document is kept from training: one in ten is, if its crc32(name) is a
    multiple of ten."""
    return zlib.crc32(name.encode()) % 10 == 0


def docstrings(*, held_out: bool, seed: int = 0) -> Iterator[Document]:
    """Yield one document per module: its docstrings, outer ones first. The seed sets the order of
    modules."""
    for name, tree in modules(held_out=held_out, seed=seed):
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, SCOPES))
        yield from document(name, "\n\n".join(text for text in texts if text))


def document(name: str, text: str) -> Iterator[Document]:
    if text.strip():
        yield Document(name, text.strip() + "\n")


def stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def chosen(names: Iterable[str], *, held_out: bool, seed: int) -> list[str]:
    """Return the names that are held out, or all others, in an order given by the seed."""
    ordered = sorted(names)
    random.Random(seed).shuffle(ordered)
    return [name for name in ordered if is_held_out(name) == held_out]


def modules(*, held_out: bool, seed: int) -> Iterator[tuple[str, ast.Module]]:
    """Yield the dotted name and the syntax tree of each module of the standard library that has
    source."""
    root = stdlib()
    paths = {dotted(path.relative_to(root)): path for path in module_files(root)}
    for name in chosen(paths, held_out=held_out, seed=seed):
        tree = parse(paths[name])
        if tree.body:
            yield name, tree


def module_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if is_library(name)
        ]  # before listing: site-packages can be huge
        yield from (
            Path(folder, name) for name in files if name.endswith(".py") and is_library(name)
        )


def is_library(name: str) -> bool:
    return name not in SKIPPED and not name.startswith(("config-", "_sysconfigdata"))


def dotted(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def parse(path: Path) -> ast.Module:
    """Parse a file; a file that this Python cannot read, as some distributions install, gives an
    empty module."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])

"""The five kinds of text the demo model is trained on, and the part of each that it never sees.

A module's docstrings and code are held out together.
"""

import ast
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from profilers.text import python
from profilers.text.files import Document
from tools.make.word_problems import word_problems


def source_code(*, held_out: bool, seed: int = 0) -> Iterator[Document]:
    """Yield one document per module: its source without docstrings and comments."""
    for name, tree in python.modules(held_out=held_out, seed=seed):
        yield from python.document(name, ast.unparse(_without_docstrings(tree)))


def reference(*, held_out: bool, seed: int = 0) -> Iterator[Document]:
    """Yield one document per topic of `help()`: chapters of the language reference, in English."""
    path = python.stdlib() / "pydoc_data" / "topics.py"
    topics = _literal_dict(python.parse(path)) if path.is_file() else {}
    for name in python.chosen(topics, held_out=held_out, seed=seed):
        yield from python.document(name, topics[name])


def headers(*, held_out: bool, seed: int = 0) -> Iterator[Document]:
    """Yield one document per C header of the interpreter; none where its development files are not
    installed."""
    root = Path(sysconfig.get_paths()["include"])
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.h")}
    for name in python.chosen(paths, held_out=held_out, seed=seed):
        yield from python.document(name, paths[name].read_text(encoding="utf-8", errors="replace"))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, python.SCOPES) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _literal_dict(tree: ast.Module) -> dict[str, str]:
    values = (node.value for node in tree.body if isinstance(node, ast.Assign))
    return next((ast.literal_eval(value) for value in values if isinstance(value, ast.Dict)), {})


# Kind -> its share of the training sequences.
SHARES = {"docstrings": 0.27, "code": 0.28, "reference": 0.13, "headers": 0.12, "problems": 0.20}
SOURCES = {
    "docstrings": python.docstrings,
    "code": source_code,
    "reference": reference,
    "headers": headers,
}
TRAINING_SEED = 1
HELD_OUT_SEED = 2
TRAINING_PROBLEMS = 750
HELD_OUT_PROBLEMS = 20


def kind_documents(kind: str, *, held_out: bool) -> Iterator[Document]:
    """The training or the held-out documents of one kind, in an order that is the same
    everywhere."""
    if kind == "problems":
        seed, count = (
            (HELD_OUT_SEED, HELD_OUT_PROBLEMS) if held_out else (TRAINING_SEED, TRAINING_PROBLEMS)
        )
        return itertools.islice(word_problems(seed=seed), count)
    return SOURCES[kind](held_out=held_out)


def present_kinds() -> list[str]:
    """The kinds this machine has: the interpreter's C headers come with its development files
    only."""
    return [kind for kind in SHARES if next(kind_documents(kind, held_out=False), None)]

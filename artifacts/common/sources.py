"""Digest of a module's source, with the source of every module of ours that it imports."""

import dis
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType

_OURS = ("artifacts", "runtime")


@cache
def digest(name: str) -> bytes:
    """sha256 of the source files of a loaded module and of the modules that these import at their
    top level, of its own package and of ours."""
    packages = {name.partition(".")[0], *_OURS}
    paths = {}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        path = getattr(sys.modules.get(module), "__file__", None)
        if path is not None and module not in paths:
            paths[module] = Path(path)
            waiting += [
                each for each in _imported(paths[module]) if each.partition(".")[0] in packages
            ]
    sources = [
        f"{module} {sha256(paths[module].read_bytes()).hexdigest()}" for module in sorted(paths)
    ]
    return sha256("\n".join(sources).encode()).digest()


@cache
def _imported(path: Path) -> tuple[str, ...]:
    """Return the names that a file imports at its top level; some of them are modules."""
    return tuple(_names(compile(path.read_bytes(), path, "exec", dont_inherit=True)))


def _names(code: CodeType) -> Iterator[str]:
    module = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield (module := instruction.argval)
        elif instruction.opname == "IMPORT_FROM":
            yield f"{module}.{instruction.argval}"

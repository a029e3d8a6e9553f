"""Imports of hundreds of modules, in less time and with a sign of life, and of what only a clone
has."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType

from rich.console import Console

from artifacts.errors import BadUsage

_ROOT = Path(__file__).parents[2]


@contextmanager
def importing(says: str = "Starting") -> Iterator[None]:
    """Show a spinner on a terminal, unless `says` is empty, and import without garbage collection.

    The objects that modules consist of, hundreds of thousands, are left out of every later
    collection, also of the one at the end of the process. Does nothing where torch was imported
    before.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    console = Console(stderr=True)
    gc.disable()
    try:
        with console.status(says) if says and console.is_terminal else nullcontext():
            yield
    finally:
        # it complains at the end of the process about its types, which then stay
        if "duckdb" not in sys.modules:
            gc.freeze()
        gc.enable()


def of_clone(module: str, asked: str) -> ModuleType:
    """Import a module of the clone's `tools`.

    Raises BadUsage where moectl is installed without its clone; `asked` is what the user typed.
    """
    if not (_ROOT / Path(*module.split("."))).with_suffix(".py").is_file():
        raise BadUsage(
            f"{asked} runs from a clone: git clone moectl, and pip install -e . in its folder"
        )
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return import_module(module)

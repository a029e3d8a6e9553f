"""Imports of hundreds of modules: in less time, and with a sign of life."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console


@contextmanager
def importing(says: str = "Starting") -> Iterator[None]:
    """Show a spinner on a terminal, unless it `says` nothing.

    Collect no garbage while what needs torch is imported, and leave the hundreds of thousands of
    objects of which modules are made, which stay, out of every later collection, also of that at
    the end of the process. Does nothing where torch was imported before."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    console = Console(stderr=True)
    gc.disable()
    try:
        with console.status(says) if says and console.is_terminal else nullcontext():
            yield
    finally:
        if (
            "duckdb" not in sys.modules
        ):  # it complains at the end of the process about its types, which then stay
            gc.freeze()
        gc.enable()

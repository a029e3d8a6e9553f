"""Imports of hundreds of modules, in less time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while what needs torch is imported, and leave the hundreds of thousands of objects of which
    modules are made, which stay, out of every later collection, also of that at the end of the process. Does nothing
    where torch was imported before."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if "duckdb" not in sys.modules:  # it complains at the end of the process about its types, which then stay
            gc.freeze()
        gc.enable()

"""One DuckDB file: schema, runs, rows to arrays and back, checks. The only room that imports
duckdb."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from artifacts.store.store import Store

__all__ = ["Store"]


def __getattr__(name: str) -> object:
    """Import `Store` on first use: other modules of this room are used without duckdb."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from artifacts.store.store import Store

    return Store

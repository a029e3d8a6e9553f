"""Defaults of commands where the user names nothing."""

import os
from pathlib import Path

DEFAULT_STORE = Path("moe.duckdb")
"""The name of the store. Where it lies, `default_store` says."""
KV = FAST, SLOW = (
    "fast",
    "slow",
)  # where the keys and values of a batch lie: beside the model, or in RAM
FREE = "auto"  # the budget that is what memory is free


def default_store() -> Path:
    """Return the store of a user who types none: that of MOECTL_STORE, or `moe.duckdb` in this
    folder if there is one, as the first versions made it, or else `users_store`."""
    if named := os.environ.get("MOECTL_STORE"):
        return Path(named)
    return DEFAULT_STORE if DEFAULT_STORE.exists() else users_store()


def users_store() -> Path:
    """Return the store in XDG's data folder (freedesktop.org's base directories)."""
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data.is_absolute():  # which the specification says to ignore
        data = Path.home() / ".local" / "share"
    return data / "moectl" / DEFAULT_STORE

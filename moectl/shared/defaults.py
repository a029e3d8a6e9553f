"""Defaults of commands where the user names nothing."""

from pathlib import Path

DEFAULT_STORE = Path("moe.duckdb")
KV = FAST, SLOW = (
    "fast",
    "slow",
)  # where the keys and values of a batch lie: beside the model, or in RAM
FREE = "auto"  # the budget that is what memory is free

"""What commands take where the user names nothing."""

from pathlib import Path

DEFAULT_STORE = Path("moe.duckdb")

"""What commands take when the user names nothing."""

from pathlib import Path

DEFAULT_STORE = Path("moe.duckdb")

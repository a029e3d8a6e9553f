"""Scripts of the house: run them from the repository's root as `python -m tools.ROOM.NAME`."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TRACE = DATA / "demo-trace.parquet"

"""Tests mirror the rooms of what they test; `faults` has a file for each class of fault, `helpers`
what tests share."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TRACE = DATA / "demo-trace.parquet"

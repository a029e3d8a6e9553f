"""Options that several commands share, so that they look and mean the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STORE = Path("moe.duckdb")

StorePath = Annotated[Path, typer.Option("--store", envvar="MOECTL_STORE", help="The store: one DuckDB file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
RunId = Annotated[int | None, typer.Option("--run", min=1, help="A run of the store; the newest that fits by default.")]

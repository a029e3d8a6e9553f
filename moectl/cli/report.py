"""The command line of `moectl report`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.options import Json, StorePath
from moectl.shared.defaults import DEFAULT_STORE


def report(
    *,
    out: Annotated[Path, typer.Argument(help="The page to write, as report.html.")],
    store: StorePath = DEFAULT_STORE,
    run: Annotated[int | None, typer.Option("--run", min=1, help="A run: of its model, led by its bench.")] = None,
    json: Json = False,
) -> None:
    """Write what a store knows of a model as one HTML page.

    Words, charts, tables, and the query of each.
    """
    from moectl.commands import report as command

    command.show(command.report(out, store=store, run=run), as_json=json)

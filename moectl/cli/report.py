"""The command line of `moectl report`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.options import Json, StorePath
from moectl.shared.defaults import DEFAULT_STORE


def report(
    *,
    out: Annotated[
        Path,
        typer.Argument(help="The page to write, as report.html; or a folder, for SVG pictures."),
    ],
    store: StorePath = DEFAULT_STORE,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="A run: of its model, led by its bench.")
    ] = None,
    json: Json = False,
) -> None:
    """Write what a store knows as one HTML page, or as pictures.

    The page has words, charts, tables, and the query of each. A folder for OUT gets the pictures
    alone.
    """
    from moectl.commands.measure import report as command

    if not out.suffix or out.is_dir():
        command.show_drawn(command.draw(out, store=store, run=run), as_json=json)
        return
    command.show(command.report(out, store=store, run=run), as_json=json)

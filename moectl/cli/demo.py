"""The command line of `moectl demo`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli import completion
from moectl.cli.options import DEFAULT_THREADS, Budget, Json, Threads
from moectl.shared.importing import importing


def demo(
    *,
    budget: Budget = "25%",
    scaled_to: Annotated[
        str,
        typer.Option(
            help="The machine whose proportions are emulated.", autocompletion=completion.machines
        ),
    ] = "rtx3090-pcie4",
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens to profile.")] = 16_384,
    threads: Threads = DEFAULT_THREADS,
    store: Annotated[Path | None, typer.Option(help="Keep the artefacts in this store.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw time against quality to this SVG file.")
    ] = None,
    json: Json = False,
) -> None:
    """Try presets on the bundled model, offline, in a minute."""
    with importing():
        from moectl.commands import demo as command
    from moectl.charts.pictures import check_picture, write_picture
    from moectl.show.demonstration import drawing

    if picture:
        check_picture(picture)
    demonstration = command.demo(
        budget=budget, scaled_to=scaled_to, tokens=tokens, store=store, threads=threads
    )
    command.show(demonstration, as_json=json)
    if picture:
        write_picture(drawing(demonstration), picture)

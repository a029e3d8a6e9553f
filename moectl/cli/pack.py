"""The command line of `moectl pack`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.bundled import demo_model
from moectl.cli.options import Json, or_bundled
from moectl.shared.importing import importing


def pack(
    *,
    model: Annotated[
        str,
        typer.Argument(callback=or_bundled, help="A checkpoint: a folder, a hub id, or bundled."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not be there yet.")],
    json: Json = False,
) -> None:
    """Rewrite a checkpoint so that each expert is one read.

    Stopped half-way, the same command goes on.
    """
    with importing():
        from moectl.commands.store import pack as command

    command.show(command.pack(model or str(demo_model()), out), as_json=json)

"""The command line of `moectl pack`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.options import Json
from moectl.shared.importing import importing
from runtime.model.locate import check_name


def pack(
    *,
    model: Annotated[str, typer.Argument(help="A checkpoint: a local folder or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not be there yet.")],
    json: Json = False,
) -> None:
    """Rewrite a checkpoint so that each expert is one read.

    Stopped half-way, the same command goes on.
    """
    check_name(model)  # before imports that take seconds
    with importing():
        from moectl.commands import pack as command

    command.show(command.pack(model, out), as_json=json)

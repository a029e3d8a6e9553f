"""The command line of `moectl import-trace`."""

from pathlib import Path
from typing import Annotated

import typer

from artifacts.importers import KINDS
from moectl.cli import completion
from moectl.cli.options import Json


def import_trace(
    *,
    file: Annotated[Path, typer.Argument(help="The log: a file, or a folder of one file a layer.")],
    kind: Annotated[
        str,
        typer.Option(
            "--as", help=f"What it is: {', '.join(KINDS)}.", autocompletion=completion.kinds_of_logs
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The trace to write. [default: NAME-trace.parquet]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Take only the first so many tokens.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="moe-jsonl, csv: take the calls that decode so many requests together."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="router-logits: experts that a token selects.")
    ] = None,
    json: Json = False,
) -> None:
    """Read another program's log of its routers.

    It becomes a trace for `moectl simulate`.
    """
    from artifacts.importers.routing_log import LogOptions
    from moectl.commands.store import import_trace as command

    options = LogOptions(tokens=tokens, batch=batch, top_k=top_k)
    command.show(command.import_trace(file, kind, out, options), as_json=json)

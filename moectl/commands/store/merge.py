"""`moectl merge`: join the shards of a profile."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.options import Json, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


def merge(
    *,
    shards: Annotated[
        list[Path], typer.Argument(help="Stores that hold the shards of one profile.")
    ],
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Merge the shards of a profile into one.

    In any order the numbers are the same.
    """
    with importing():
        from moectl.commands.build.profile import show
        from profilers.routing.shards import merge_shards

    show(merge_shards(shards, into=store), as_json=json)

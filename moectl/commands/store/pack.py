"""`moectl pack`: rewrite a checkpoint once, so that each expert is one read."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moectl.bundled import demo_model
from moectl.cli.options import Json, or_bundled
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable


@resumable("what was packed is kept")
def pack(
    *,
    model: Annotated[
        str,
        typer.Argument(callback=or_bundled, help="A checkpoint, by any of its names, or bundled."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not be there yet.")],
    json: Json = False,
) -> None:
    """Rewrite a checkpoint so that each expert is one read.

    Stopped half-way, the same command goes on.
    """
    with importing():
        from moectl.shared.opening import open_quietly
        from moectl.shared.terminal.progress import progress_bar
        from moectl.show.render import console, human_bytes, show_json
        from runtime.model.files.checkpoint import open_checkpoint
        from runtime.model.files.locate import locate
        from runtime.model.files.pack import pack as rewrite

    name = model or str(demo_model())
    opened = open_quietly(name, device="cpu")
    checkpoint = open_checkpoint(locate(name))
    with progress_bar("packing", unit="files") as advance:
        packed = rewrite(opened, checkpoint, out, progress=advance)
    if json:
        show_json(asdict(packed) | {"folder": str(packed.folder)})
        return
    gain = f"an expert is {_reads(packed.reads_now)}, {_reads(packed.reads_before)} before"
    console().print(f"{packed.folder}: {human_bytes(packed.nbytes)}; {gain}", markup=False)


def _reads(count: int) -> str:
    return "one read" if count == 1 else f"{count} reads"

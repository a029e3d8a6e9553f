"""`moectl pack`: rewrite a checkpoint once, so that each expert is one read."""

from dataclasses import asdict
from pathlib import Path

from moectl.shared.opening import open_quietly
from moectl.shared.progress import progress_bar
from moectl.shared.resuming import resumable
from moectl.show.render import console, human_bytes, show_json
from runtime.model.checkpoint import open_checkpoint
from runtime.model.locate import locate
from runtime.model.pack import Repacked
from runtime.model.pack import pack as rewrite


@resumable("what was packed is kept")
def pack(name: str, out: Path) -> Repacked:
    """Write the model `name`, a folder or hub id, to the new folder `out`.

    Raises BadInput for a model that cannot be opened or a folder that cannot be made. Raises
    Incompatible for a family whose experts cannot be stored one by one, and OutOfResources when the
    disk has no room.
    """
    opened = open_quietly(name, device="cpu")
    checkpoint = open_checkpoint(locate(name))
    with progress_bar("packing", unit="files") as advance:
        return rewrite(opened, checkpoint, out, progress=advance)


def show(packed: Repacked, *, as_json: bool) -> None:
    """Print the folder that was written, and what an expert's reads were and are."""
    if as_json:
        show_json(asdict(packed) | {"folder": str(packed.folder)})
        return
    gain = f"an expert is {_reads(packed.reads_now)}, {_reads(packed.reads_before)} before"
    console().print(f"{packed.folder}: {human_bytes(packed.nbytes)}; {gain}", markup=False)


def _reads(count: int) -> str:
    return "one read" if count == 1 else f"{count} reads"

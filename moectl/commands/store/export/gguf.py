"""`moectl export --what gguf`: write the whole model as one GGUF file, which llama.cpp reads."""

from dataclasses import dataclass
from pathlib import Path

from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput, BadUsage
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.progress import progress_bar
from moectl.shared.resuming import resumable
from moectl.show.render import console, human_bytes, show_json
from profilers.export.gguf import TYPES, export_gguf
from runtime.model.locate import locate

GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ExportedGguf:
    """The written file and the type of its matrices."""

    path: Path
    type: str
    nbytes: int


@resumable()
def export(name: str | None, out: Path | None, type_: str) -> ExportedGguf:
    """Write the model `name` (None: the bundled one) to the new file `out`.

    Raises BadUsage (no file, unknown type) and what `export_gguf` raises.
    """
    if out is None:
        raise BadUsage("a GGUF model is a file: give --out FILE, which must not be there yet")
    if type_ not in TYPES:
        raise BadUsage(unknown("type", type_, TYPES))
    if out.exists():
        raise BadInput(f"{out} is there already: name a new file")
    name = name or str(demo_model())
    opened = open_quietly(name, device="cpu")
    with progress_bar("exporting", unit="matrices") as advance:
        export_gguf(opened, locate(name), out, type_, progress=advance)
    return ExportedGguf(out, type_, out.stat().st_size)


def show(exported: ExportedGguf, *, as_json: bool) -> None:
    """Print the file that was written."""
    if as_json:
        show_json({"file": str(exported.path), "type": exported.type, "nbytes": exported.nbytes})
    else:
        console().print(
            f"{exported.path}: matrices in {exported.type}, {human_bytes(exported.nbytes)}",
            markup=False,
        )

"""`moectl export`: write a store's content for other programs: GPTQ checkpoint, JSON, CSV, an
option of llama.cpp."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from artifacts.common.files import replacing
from artifacts.common.suggestions import unknown
from artifacts.common.untrusted import inside
from artifacts.errors import BadInput, BadUsage, Incompatible
from artifacts.quantisation.gptq_checkpoint import WIDTHS
from artifacts.quantisation.replica_file import Parts, read_replica, replica_root, verify
from artifacts.quantisation.widths import listed
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from moectl.bundled import demo_model
from moectl.commands.store.export.forms import (
    FORMS,
    JSON_FORMS,
    OVERRIDE_TENSOR,
    Exportable,
    find,
    override_tensor,
    routing,
)
from moectl.commands.store.export.gguf import GGUF
from moectl.shared.opening import open_quietly
from moectl.shared.progress import progress_bar
from moectl.shared.resuming import resumable
from moectl.show.render import console, human_bytes, show_json
from profilers.export.gptq import export_gptq
from profilers.quantise.method import TRELLIS
from runtime.model.checkpoint import open_checkpoint
from runtime.model.locate import locate

GPTQ = "gptq"
_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Exported:
    """The written checkpoint, and the run whose replicas it holds."""

    folder: Path
    run_id: int
    bits: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExportedText:
    """A text for other programs and the run it comes from; `out` is the file that holds it, if
    any."""

    what: str
    text: str
    run_id: int
    out: Path | None


def export_text(
    name: str | None, what: str, out: Path | None, *, budget: str, store: Path, run: int | None
) -> ExportedText:
    """Return what the newest fitting run holds, of the model `name` if one is named; write it to
    `out` if given.

    Raises BadUsage (unknown name), BadInput (store) and Incompatible (no such run, another model).
    """
    if what not in FORMS:
        raise BadUsage(unknown("export", what, (GPTQ, GGUF, *FORMS)))
    opened = open_quietly(name, device="cpu") if name else None
    with Store.open(store, read_only=True) as kept:
        model = kept.require_model(opened.fingerprint, name=name) if opened else None
        source = find(kept, what, run_id=run, model=model, budget=budget)
        text = _text(what, source)
    if out:
        with replacing(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return ExportedText(what, text, source.run.run_id, out)


def _text(what: str, source: Exportable) -> str:
    if what in JSON_FORMS:
        return json.dumps(JSON_FORMS[what](source)) + "\n"
    return (
        override_tensor(source, _blocks(source.model.name))
        if what == OVERRIDE_TENSOR
        else routing(source)
    )


def _blocks(name: str) -> list[int]:
    """Return the numbers of the MoE layers among all layers; earlier layers may be dense."""
    return [int(_BLOCK.search(layer.name)[1]) for layer in open_quietly(name, device="cpu").layers]


def show_text(text: ExportedText, *, as_json: bool) -> None:
    """Print the text, or the file that holds it. In JSON a text that is not JSON itself is a
    string."""
    if as_json:
        content = json.loads(text.text) if text.what in JSON_FORMS else text.text
        show_json(
            {
                "what": text.what,
                "run": text.run_id,
                "out": text.out and str(text.out),
                "content": content,
            }
        )
    elif text.out is None:
        print(text.text, end="")
    else:
        console().print(f"{text.out}: {text.what} of run {text.run_id}", markup=False)


@resumable()
def export(
    name: str | None, out: Path | None, *, bits: int, store: Path, run: int | None
) -> Exported:
    """Write the model `name` (None: the bundled one) with its experts at `bits` to the new folder
    `out`.

    Every replica file is compared with its hash before it is used.
    """
    if out is None:
        raise BadUsage(
            "a GPTQ checkpoint is a folder: give --out FOLDER, which must not be there yet"
        )
    if bits not in WIDTHS:
        raise BadUsage(f"GPTQ checkpoints have {listed(WIDTHS, last=' or ')} bits, not {bits}")
    name = name or str(demo_model())
    opened = open_quietly(name, device="cpu")
    with Store.open(store, read_only=True) as kept:
        model = kept.require_model(opened.fingerprint, name=name)
        chosen = _run(kept, run, model.model_id)
        rows = [
            row for row in kept.read("replicas", chosen.run_id).to_pylist() if row["bits"] == bits
        ]
    if not rows:
        raise BadInput(
            f"run {chosen.run_id} of {store} has no replicas of {bits} bits: run moectl quantize "
            f"--recipe refined --bits {bits}"
        )
    files = {
        (row["layer"], row["expert"]): (inside(replica_root(store), row["file"]), row["hash"])
        for row in rows
    }

    def read(layer: int, expert: int) -> Parts:
        path, hash = files[layer, expert]
        verify(path, hash)
        return read_replica(path, bits, model=opened.fingerprint, key=(layer, expert))

    with progress_bar("exporting", unit="layers") as advance:
        checkpoint = open_checkpoint(locate(name))
        export_gptq(opened, checkpoint, read, out, first_file=files[0, 0][0], progress=advance)
    return Exported(out, chosen.run_id, bits, sum(path.stat().st_size for path in out.iterdir()))


def show(exported: Exported, *, as_json: bool) -> None:
    """Print the folder that was written."""
    if as_json:
        record = {"folder": str(exported.folder), "run": exported.run_id, "bits": exported.bits}
        show_json(record | {"nbytes": exported.nbytes})
    else:
        what = (
            f"{exported.bits}-bit experts of run {exported.run_id}, {human_bytes(exported.nbytes)}"
        )
        console().print(f"{exported.folder}: {what}, in the layout gptq_v2", markup=False)


def _run(store: Store, run_id: int | None, model_id: str) -> StoredRun:
    """Return the run asked for, else the newest run of this model that wrote replicas of GPTQ's
    recipes."""
    made = [
        run
        for run in store.runs()
        if (run.info.command, run.info.model_id) == ("quantize", model_id)
    ]
    usable = [run for run in made if not _is_coded(run)]
    run = store.run(run_id) if run_id is not None else next(reversed(usable), None)
    if (run is None and made) or (run is not None and _is_coded(run)):
        raise Incompatible(
            f"{store.path} holds this model's replicas in trellis codes, which no reader of GPTQ "
            "reads: run moectl quantize --recipe refined, and export again"
        )
    if run is None or "replicas" not in run.contents:
        raise Incompatible(
            f"{store.path} holds no replicas of this model: run moectl quantize --recipe refined "
            "first"
        )
    if run.info.model_id != model_id:
        raise Incompatible(
            f"run {run.run_id} of {store.path} is of another model ({run.info.model_id})"
        )
    return run


def _is_coded(run: StoredRun) -> bool:
    return run.info.parameters.get("recipe") == TRELLIS

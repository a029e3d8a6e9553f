"""`moectl export`: write a store's content, or the model, for other programs: GPTQ checkpoint, GGUF
file, JSON, CSV, an option of llama.cpp."""

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.files import replacing
from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput, BadUsage, Incompatible
from moectl.bundled import demo_model
from moectl.cli.options import AnyModel, Budget, Json, RunId, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from artifacts.quantisation.replica_file import Parts
    from artifacts.store.runs import StoredRun
    from artifacts.store.store import Store

_Told = dict[str, object]
"""An export as JSON values; beside it stands its line."""


def export(
    *,
    model: AnyModel = None,
    what: Annotated[
        str,
        typer.Option(
            help="gptq (a checkpoint: experts from their replicas, the rest as it is), gguf (the "
            "model as one file for llama.cpp), buddies, splits, placement or profile (JSON), "
            "routing (CSV), override-tensor (an option of llama.cpp)."
        ),
    ] = "gptq",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write, else stdout; of gptq a new folder, of gguf a new file."
        ),
    ] = None,
    bits: Annotated[int, typer.Option(help="Of gptq: 2, 3, 4 or 8.")] = 4,
    type: Annotated[
        str, typer.Option(help="Of gguf: f32, f16, bf16, q8_0, q4_0 or mxfp4.")
    ] = "bf16",
    budget: Budget = "25%",
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    json: Json = False,
) -> None:
    """Write a store, or the model, for other programs."""
    if what == "gguf":
        told, line = _write_gguf(model, out, type)
    elif what == "gptq":
        told, line = _write_gptq(model, out, bits=bits, store=store, run=run)
    else:
        told, line = _write_text(model, what, out, budget=budget, store=store, run=run)
    from moectl.show.render import console, show_json

    if json:
        show_json(told)
    elif out:
        console().print(line, markup=False)
    else:
        print(line, end="")


def _write_text(
    name: str | None, what: str, out: Path | None, *, budget: str, store: Path, run: int | None
) -> tuple[_Told, str]:
    """Write what the newest fitting run holds, of the model `name` if one is named, to `out`;
    without that it is what to print.

    Raises BadUsage (unknown name), BadInput (store) and Incompatible (no such run, another model).
    """
    with importing():
        from artifacts.store.store import Store
        from moectl.commands.store.export.forms import FORMS, find
        from moectl.shared.opening import open_quietly

    if what not in FORMS:
        raise BadUsage(unknown("export", what, ("gptq", "gguf", *FORMS)))
    opened = open_quietly(name, device="cpu") if name else None
    with Store.open(store, read_only=True) as kept:
        model = kept.require_model(opened.fingerprint, name=name) if opened else None
        source = find(kept, what, run_id=run, model=model, budget=budget)
        content = FORMS[what](source)
    text = content if isinstance(content, str) else dumps(content) + "\n"
    run = source.run.run_id
    told = {"what": what, "run": run, "out": out and str(out), "content": content}
    if out is None:
        return told, text
    with replacing(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return told, f"{out}: {what} of run {run}"


@resumable()
def _write_gguf(name: str | None, out: Path | None, type_: str) -> tuple[_Told, str]:
    """Write the model `name` (None: the bundled one) to the new file `out`.

    Raises BadUsage (no file, unknown type) and what `export_gguf` raises.
    """
    with importing():
        from moectl.shared.opening import open_quietly
        from moectl.shared.terminal.progress import progress_bar
        from moectl.show.render import human_bytes
        from profilers.export.gguf import TYPES, export_gguf
        from runtime.model.files.locate import locate

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
    nbytes = out.stat().st_size
    told = {"file": str(out), "type": type_, "nbytes": nbytes}
    return told, f"{out}: matrices in {type_}, {human_bytes(nbytes)}"


@resumable()
def _write_gptq(
    name: str | None, out: Path | None, *, bits: int, store: Path, run: int | None
) -> tuple[_Told, str]:
    """Write the model `name` (None: the bundled one) with its experts at `bits` to the new folder
    `out`.

    Every replica file is compared with its hash before it is used.
    """
    with importing():
        from artifacts.common.untrusted import inside
        from artifacts.quantisation.gptq_checkpoint import WIDTHS
        from artifacts.quantisation.replica_file import read_replica, replica_root, verify
        from artifacts.quantisation.widths import listed
        from artifacts.store.store import Store
        from moectl.shared.opening import open_quietly
        from moectl.shared.terminal.progress import progress_bar
        from moectl.show.render import human_bytes
        from profilers.export.gptq import export_gptq
        from runtime.model.files.checkpoint import open_checkpoint
        from runtime.model.files.locate import locate

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

    def read(layer: int, expert: int) -> "Parts":
        path, hash = files[layer, expert]
        verify(path, hash)
        return read_replica(path, bits, model=opened.fingerprint, key=(layer, expert))

    with progress_bar("exporting", unit="layers") as advance:
        checkpoint = open_checkpoint(locate(name))
        export_gptq(opened, checkpoint, read, out, first_file=files[0, 0][0], progress=advance)
    run = chosen.run_id
    nbytes = sum(path.stat().st_size for path in out.iterdir())
    told = {"folder": str(out), "run": run, "bits": bits, "nbytes": nbytes}
    what = f"{bits}-bit experts of run {run}, {human_bytes(nbytes)}"
    return told, f"{out}: {what}, in the layout gptq_v2"


def _run(store: "Store", run_id: int | None, model_id: str) -> "StoredRun":
    """Return the run asked for, else the newest run of this model that wrote replicas of GPTQ's
    recipes."""
    made = store.runs(command="quantize", model_id=model_id)
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


def _is_coded(run: "StoredRun") -> bool:
    return run.info.parameters.get("recipe") == "trellis"

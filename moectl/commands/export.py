"""`moectl export`: a GPTQ checkpoint out of the replicas of one width."""

from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput, BadUsage, Incompatible
from artifacts.gptqfile import WIDTHS
from artifacts.provenance import StoredRun
from artifacts.replicafile import Parts, read_replica, replica_root, verify
from artifacts.store import Store
from moectl.bundled import demo_model
from moectl.opening import open_quietly
from moectl.progress import progress_bar
from moectl.render import console, human_bytes, show_json
from profilers.exporting import export_gptq
from runtime.checkpoint import open_checkpoint
from runtime.locate import locate


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, from which run."""

    folder: Path
    run_id: int
    bits: int
    nbytes: int


def export(name: str | None, out: Path, *, bits: int, store: Path, run: int | None) -> Exported:
    """Write the model `name` (None: the bundled one) with its experts at `bits` to the new folder `out`.

    Every file of replicas is compared with its hash before it is used.
    """
    if bits not in WIDTHS:
        raise BadUsage(f"GPTQ checkpoints have 2, 3 or 4 bits, not {bits}")
    name = name or str(demo_model())
    opened = open_quietly(name, device="cpu")
    with Store.open(store, read_only=True) as kept:
        model = kept.require_model(opened.fingerprint, name=name)
        chosen = _run(kept, run, model.model_id)
        rows = [row for row in kept.read("replicas", chosen.run_id).to_pylist() if row["bits"] == bits]
    if not rows:
        raise BadInput(
            f"run {chosen.run_id} of {store} has no replicas of {bits} bits: run moectl quantize --bits {bits}"
        )
    files = {(row["layer"], row["expert"]): (replica_root(store) / row["file"], row["hash"]) for row in rows}

    def read(layer: int, expert: int) -> Parts:
        path, hash = files[layer, expert]
        verify(path, hash)
        return read_replica(path, bits, model=opened.fingerprint, key=(layer, expert))

    with progress_bar("exporting", unit="layers") as advance:
        checkpoint = open_checkpoint(locate(name))
        export_gptq(opened, checkpoint, read, out, first_file=files[0, 0][0], progress=advance)
    return Exported(out, chosen.run_id, bits, sum(path.stat().st_size for path in out.iterdir()))


def show(exported: Exported, *, as_json: bool) -> None:
    """Say where it lies."""
    if as_json:
        record = {"folder": str(exported.folder), "run": exported.run_id, "bits": exported.bits}
        show_json(record | {"nbytes": exported.nbytes})
    else:
        what = f"{exported.bits}-bit experts of run {exported.run_id}, {human_bytes(exported.nbytes)}"
        console().print(f"{exported.folder}: {what}, in the layout gptq_v2", markup=False)


def _run(store: Store, run_id: int | None, model_id: str) -> StoredRun:
    """The run asked for, or the newest of this model that wrote replicas."""
    found = store.run(run_id) if run_id is not None else store.latest_run("quantize", model_id)
    if found is None or "replicas" not in found.contents:
        raise Incompatible(f"{store.path} holds no replicas of this model: run moectl quantize first")
    if found.info.model_id != model_id:
        raise Incompatible(f"run {found.run_id} of {store.path} is of another model ({found.info.model_id})")
    return found

"""Compares a store with a checkpoint: the fingerprint of its model, and the source of every
replica."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from artifacts.common.untrusted import inside
from artifacts.errors import BadInput, Incompatible
from artifacts.quantisation.replica_file import SOURCE, read_metadata, replica_root
from artifacts.store.leftovers import StoreFinding
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from moectl.shared.opening import open_quietly
from runtime.model.layout import aligned
from runtime.model.open import MoeModel


def compared(store: Store, name: str) -> list[StoreFinding]:
    """Return a finding if the store does not hold the model `name`, a folder or hub id, and one for
    each run whose replicas are of other weights. Every expert that has replicas is read once.

    Raises BadInput for a model that cannot be opened.
    """
    opened = open_quietly(name, device="cpu")
    try:
        model = store.require_model(opened.fingerprint, name=name)
    except Incompatible as problem:
        return [
            StoreFinding(
                name, str(problem), "run moectl profile on it, or name a model of this store"
            )
        ]
    runs = store.runs(model_id=model.model_id, table="replicas")
    findings = list(_other_sources(store, runs, opened))
    opened.store.check_unchanged()
    return findings


def _other_sources(store: Store, runs: list[StoredRun], opened: MoeModel) -> Iterator[StoreFinding]:
    buffer = aligned(opened.store.layout.nbytes)

    @cache
    def digest(layer: int, expert: int) -> str:
        opened.store.read(layer, expert, buffer)
        return opened.store.layout.digest(buffer)

    for run in runs:
        rows = store.read("replicas", run.run_id).to_pylist()
        keys = {row["file"]: (row["layer"], row["expert"]) for row in rows}
        others = [
            key
            for file, key in keys.items()
            if (source := _source(inside(replica_root(store.path), file))) is not None
            and source != digest(*key)
        ]
        if others:
            layer, expert = others[0]
            yield StoreFinding(
                f"run {run.run_id}",
                f"{len(others)} of {len(keys)} replica files are of other weights than the "
                f"checkpoint has, as layer {layer}, expert {expert}",
                (
                    "run moectl quantize again, and profile again too: its counts may be of other "
                    "weights as well"
                ),
            )


def _source(path: Path) -> str | None:
    """Return the hash of the expert that a file was made of, None for a file that cannot be read,
    which has a finding of its own."""
    try:
        return read_metadata(path).get(SOURCE, "")
    except BadInput:
        return None

"""A store of everything that a run can read, altered by a statement and read again."""

from pathlib import Path

import duckdb

from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.store import Store
from artifacts.traces.parquet import from_table
from runtime.session.artefacts import load_artefacts
from tests.helpers import artefacts


def changed(store: Path, statement: str) -> Path:
    with duckdb.connect(store) as connection:
        connection.execute(statement)
    return store


def everything(path: Path) -> None:
    with Store.open(path, read_only=True) as store:
        load_artefacts(store, artefacts.MODEL.model_id, artefacts.SHAPE)
        stored_profile(store, artefacts.MODEL.model_id)
        for run in store.runs():
            if "traces" in run.contents:
                from_table(
                    store.read("traces", run.run_id), num_experts=artefacts.SHAPE.num_experts
                )

"""Tuned presets as rows of the store's `presets`: policies by axis, and what they were tuned
for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from artifacts.store.store import Store

TABLE = "presets"


@dataclass(frozen=True, slots=True)
class StoredPreset:
    """A preset with its policies as texts, tuned for a budget and a machine to lose at most the
    share `max_loss` of perplexity. `tpot_ms` and `perplexity_ratio` are time and loss measured
    live, None where they were not measured."""

    name: str
    routing: str
    prefetch: str
    eviction: str
    miss: str
    residency: str
    scope: str
    budget: str
    machine: str
    max_loss: float
    tpot_ms: float | None = None
    perplexity_ratio: float | None = None


_NUMBERS = ("max_loss", "tpot_ms", "perplexity_ratio")
_SCHEMA = pa.schema(
    [
        (name, pa.float64() if name in _NUMBERS else pa.string())
        for name in StoredPreset.__dataclass_fields__
    ]
)


@dataclass(frozen=True, slots=True)
class PresetRecord:
    """A stored preset with the run that wrote it and the model that it belongs to."""

    preset: StoredPreset
    run_id: int
    model_id: str


def to_rows(presets: Sequence[StoredPreset]) -> pa.Table:
    """Rows of `presets`."""
    return pa.Table.from_pylist([asdict(preset) for preset in presets], schema=_SCHEMA)


def stored_presets(store: Store) -> list[PresetRecord]:
    """All stored presets, the newest first."""
    return [
        PresetRecord(StoredPreset(**row), run.run_id, run.info.model_id or "")
        for run in reversed(store.runs(table=TABLE))
        for row in store.read(TABLE, run.run_id).to_pylist()
    ]

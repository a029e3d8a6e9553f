"""Presets that were tuned, as rows of the store's `presets`: policies by axis, and what they were tuned for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from artifacts.store.store import Store

TABLE = "presets"


@dataclass(frozen=True, slots=True)
class StoredPreset:
    """Policies as texts. Tuned for a budget and a machine, to lose at most the share `max_loss` of perplexity; what it
    then took and lost, as measured live, None where it was not."""

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


@dataclass(frozen=True, slots=True)
class PresetRecord:
    """One with the run that wrote it and the model that it is of."""

    preset: StoredPreset
    run_id: int
    model_id: str


_NUMBERS = ("max_loss", "tpot_ms", "perplexity_ratio")
_SCHEMA = pa.schema(
    [(name, pa.float64() if name in _NUMBERS else pa.string()) for name in StoredPreset.__dataclass_fields__]
)


def to_rows(presets: Sequence[StoredPreset]) -> pa.Table:
    """Rows of `presets`."""
    return pa.Table.from_pylist([asdict(one) for one in presets], schema=_SCHEMA)


def stored_presets(store: Store) -> list[PresetRecord]:
    """All of them, the newest first."""
    runs = [run for run in reversed(store.runs()) if TABLE in run.contents]
    return [
        PresetRecord(StoredPreset(**row), run.run_id, run.info.model_id or "")
        for run in runs
        for row in store.read(TABLE, run.run_id).to_pylist()
    ]

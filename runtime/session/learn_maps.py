"""Writes the expert maps that a run has learned from its iterations to the store, in one
transaction (fMoE)."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from artifacts.routing.expert_maps import ExpertMaps
from artifacts.store.runs import ModelInfo, RunInfo, StoredRun
from runtime.policies.shared.maps import LearnedMaps

if TYPE_CHECKING:  # imported late: a run that writes nothing saves the memory of these imports
    from artifacts.store.store import Store


@dataclass(frozen=True, slots=True)
class WrittenMaps:
    """Result of writing maps. `others` is the run that wrote maps to the store meanwhile, whose
    maps are included."""

    run_id: int
    num_maps: int
    num_iterations: int
    others: int | None


def write_learned_maps(
    learned: LearnedMaps,
    *,
    store_path: Path,
    model: ModelInfo,
    began_with: int | None,
    started_at: datetime,
    seconds: float,
) -> WrittenMaps | None:
    """Write the maps as a run of their own, whole or not at all; None when no iteration was
    complete. `began_with` is the run whose maps this session started from. If the store has newer
    maps by now, the new iterations are added to those.

    Replaces maps that an earlier run learned, but not those of `moectl build-maps`. Raises
    OutOfResources (store in use, disk full) and BadInput, and leaves the store unchanged then.
    """
    from artifacts.store.database import PATIENCE_S
    from artifacts.store.expert_maps import LEARN, TABLE, latest_maps, map_rows, stored_origins
    from artifacts.store.store import Store

    if not learned.num_iterations:
        return None
    with Store.open(store_path, patience_s=PATIENCE_S) as store:
        store.add_model(model)
        latest = latest_maps(store, model.model_id)
        is_newer = latest is not None and latest.run_id != began_with
        before = stored_origins(store, latest.run_id) if latest else np.zeros((0, 2), np.int64)
        maps, rows = (
            _joined(store, latest, learned) if is_newer else (learned.maps, learned.newcomers)
        )
        info = RunInfo(
            LEARN,
            model.model_id,
            started_at,
            seconds,
            "requests",
            parameters=_parameters(learned, maps, latest),
        )
        table = map_rows(maps, _origins(before, rows, learned.origins, len(maps)))
        gives_way = latest.run_id if latest and latest.info.command == LEARN else None
        run_id = store.write_run(info, {TABLE: table}, instead_of=gives_way)
    return WrittenMaps(
        run_id, len(maps), learned.num_iterations, latest.run_id if is_newer else None
    )


def _parameters(
    learned: LearnedMaps, maps: ExpertMaps, latest: StoredRun | None
) -> dict[str, object]:
    return {
        "capacity": maps.capacity,
        "distance": maps.distance,
        "dtype": maps.dtype,
        "iterations": learned.num_iterations,
        "after": latest.run_id if latest else None,
    }


def _joined(
    store: "Store", latest: StoredRun, learned: LearnedMaps
) -> tuple[ExpertMaps, np.ndarray]:
    """Return the store's maps with the new iterations added that `learned` still holds, and the row
    of each, [n]."""
    from artifacts.store.expert_maps import stored_maps

    maps = stored_maps(store, run_id=latest.run_id)
    return maps, maps.add(
        *(part[learned.newcomers] for part in (learned.maps.embeddings, learned.maps.probabilities))
    )


def _origins(before: np.ndarray, rows: np.ndarray, new: np.ndarray, num_maps: int) -> np.ndarray:
    """Return the request and iteration of each map, [N, 2]; new requests are numbered on from those
    before."""
    origins = np.zeros((num_maps, 2), np.int64)
    origins[: len(before)] = before
    first = before[:, 0].max(initial=-1) + 1
    # the last in a row counts
    for row, (request, iteration) in zip(rows.tolist(), new.tolist(), strict=True):
        origins[row] = first + request, iteration
    return origins

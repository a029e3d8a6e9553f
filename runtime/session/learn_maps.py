"""What a run has learned goes back to the store: expert maps with its iterations, in one transaction (fMoE)."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from artifacts.routing.expert_maps import ExpertMaps
from artifacts.store.runs import ModelInfo, RunInfo, StoredRun, utc_now
from runtime.policies.shared.maps import Learned

if TYPE_CHECKING:  # a run that keeps nothing has no need of what a store takes in memory
    from artifacts.store.store import Store


@dataclass(frozen=True, slots=True)
class Kept:
    """What was written. `others`: the run of the store that had learned meanwhile, whose maps are in it too."""

    run_id: int
    num_maps: int
    num_iterations: int
    others: int | None


def keep(
    learned: Learned, *, store_path: Path, model: ModelInfo, began_with: int | None, started_at: datetime
) -> Kept | None:
    """Write the maps as a run of their own, whole or not at all; None when no iteration was whole. `began_with`: the
    run whose maps this one set out from. Where the store has newer ones by now, the newcomers join those.

    Maps that were learned before give way to these; what `moectl build-maps` made stays. Raises OutOfResources (store
    in use, disk full) and BadInput; everything that the store held is then still there.
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
        maps, rows = _joined(store, latest, learned) if is_newer else (learned.maps, learned.newcomers)
        info = RunInfo(
            command=LEARN,
            model_id=model.model_id,
            started_at=started_at,
            seconds=(utc_now() - started_at).total_seconds(),
            data="requests",
            parameters={
                "capacity": maps.capacity,
                "distance": maps.distance,
                "dtype": maps.dtype,
                "iterations": learned.num_iterations,
                "after": latest.run_id if latest else None,
            },
        )
        table = map_rows(maps, _origins(before, rows, learned.origins, len(maps)))
        gives_way = latest.run_id if latest and latest.info.command == LEARN else None
        run_id = store.write_run(info, {TABLE: table}, instead_of=gives_way)
    return Kept(run_id, len(maps), learned.num_iterations, latest.run_id if is_newer else None)


def _joined(store: "Store", latest: StoredRun, learned: Learned) -> tuple[ExpertMaps, np.ndarray]:
    """The store's maps with those newcomers that are still held, and where each went."""
    from artifacts.store.expert_maps import stored_maps

    maps = stored_maps(store, run_id=latest.run_id)
    return maps, maps.add(*(part[learned.newcomers] for part in (learned.maps.embeddings, learned.maps.probabilities)))


def _origins(before: np.ndarray, rows: np.ndarray, new: np.ndarray, num_maps: int) -> np.ndarray:
    """[N, 2]: requests are counted on from those known before."""
    origins = np.zeros((num_maps, 2), np.int64)
    origins[: len(before)] = before
    first = before[:, 0].max(initial=-1) + 1
    for row, (request, iteration) in zip(rows.tolist(), new.tolist(), strict=True):  # of several in one row the last
        origins[row] = first + request, iteration
    return origins

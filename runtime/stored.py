"""Artefacts out of the store, as policies want them."""

import numpy as np

from artifacts.shape import Shape
from artifacts.store import Store
from runtime.policies.base import Artefacts


def load_artefacts(store: Store, model_id: str, shape: Shape) -> Artefacts:
    """What the newest runs of this model left; None for what was never built."""
    buddies, buddy_q = _buddies(store, model_id, shape)
    return Artefacts(buddies=buddies, buddy_q=buddy_q, entropy=_entropy(store, model_id))


def _buddies(store: Store, model_id: str, shape: Shape) -> tuple[np.ndarray | None, np.ndarray | None]:
    run = store.latest_run("build-buddies", model_id)
    if run is None:
        return None, None
    rows = store.read("buddies", run.run_id)
    layer, pivot, rank, buddy = (rows[name].to_numpy().astype(np.int64) for name in ("layer", "pivot", "rank", "buddy"))
    size = (shape.num_layers, shape.num_experts, int(rank.max(initial=0)) + 1)
    ids, q = np.full(size, -1, np.int64), np.zeros(size, np.float64)
    ids[layer, pivot, rank] = buddy
    q[layer, pivot, rank] = rows["q"].to_numpy()
    return ids, q


def _entropy(store: Store, model_id: str) -> np.ndarray | None:
    run = store.latest_run("profile", model_id)
    if run is None:
        return None
    rows = store.read("entropy", run.run_id)
    return np.stack(rows["percentiles"].to_numpy())

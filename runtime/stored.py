"""Artefacts out of the store, as policies want them."""

from artifacts.rows import buddy_matrices, entropy_percentiles
from artifacts.shape import Shape
from artifacts.store import Store
from runtime.policies.base import Artefacts


def load_artefacts(store: Store, model_id: str, shape: Shape) -> Artefacts:
    """What the newest runs of this model left; None for what was never built."""
    lists, profile = store.latest_run("build-buddies", model_id), store.latest_run("profile", model_id)
    size = (shape.num_layers, shape.num_experts)
    buddies, q = buddy_matrices(store.read("buddies", lists.run_id), *size) if lists else (None, None)
    entropy = entropy_percentiles(store.read("entropy", profile.run_id)) if profile else None
    return Artefacts(buddies=buddies, buddy_q=q, entropy=entropy)

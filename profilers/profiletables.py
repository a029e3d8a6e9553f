"""A routing profile as rows of the store, and back."""

import numpy as np
import pyarrow as pa

from artifacts.shape import Shape
from artifacts.store import Store
from artifacts.trace import PHASES
from profilers.routing import RoutingProfile


def tables(profile: RoutingProfile) -> dict[str, pa.Table]:
    """The rows of `activations`, `coactivations` and `entropy`."""
    arrays = profile.arrays()
    layer, phase, expert = (index.ravel() for index in np.indices(profile.use.shape))
    pair_layer, i, j = np.nonzero(arrays["pairs"])
    return {
        "activations": pa.table(
            {
                "phase": np.array(PHASES)[phase],
                "layer": layer.astype(np.uint16),
                "expert": expert.astype(np.uint16),
                "count": profile.use.ravel(),
                "weight": profile.share.ravel(),
            }
        ),
        "coactivations": pa.table(
            {
                "layer": pair_layer.astype(np.uint16),
                "i": i.astype(np.uint16),
                "j": j.astype(np.uint16),
                "count": arrays["pairs"][pair_layer, i, j],
                "weight": arrays["weighted"][pair_layer, i, j],
            }
        ),
        "entropy": pa.table(
            {
                "layer": np.arange(len(profile.entropy), dtype=np.uint16),
                "percentiles": [histogram.percentiles() for histogram in profile.entropy],
                "histogram": list(arrays["entropy"]),
            }
        ),
    }


def stored(store: Store, run_id: int, shape: Shape) -> RoutingProfile:
    """The profile that a run wrote."""
    use = store.read("activations", run_id)
    size = (shape.num_layers, len(PHASES), shape.num_experts)
    pairs = store.read("coactivations", run_id)
    square = (shape.num_layers, shape.num_experts, shape.num_experts)
    where = tuple(pairs[name].to_numpy().astype(np.int64) for name in ("layer", "i", "j"))
    phase = np.array([PHASES.index(name) for name in use["phase"].to_pylist()])
    cell = (use["layer"].to_numpy().astype(np.int64), phase, use["expert"].to_numpy().astype(np.int64))
    return RoutingProfile.from_arrays(
        {
            "use": _scattered(size, cell, use["count"].to_numpy()),
            "share": _scattered(size, cell, use["weight"].to_numpy()),
            "pairs": _scattered(square, where, pairs["count"].to_numpy()),
            "weighted": _scattered(square, where, pairs["weight"].to_numpy()),
            "entropy": np.stack(store.read("entropy", run_id)["histogram"].to_numpy()),
        }
    )


def _scattered(size: tuple[int, ...], where: tuple[np.ndarray, ...], values: np.ndarray) -> np.ndarray:
    full = np.zeros(size, values.dtype)
    full[where] = values
    return full

"""Converts a routing profile to rows of the store, and back."""

import numpy as np
import pyarrow as pa

from artifacts.shape import Shape
from artifacts.store.rows import activation_matrices, coactivation_matrices
from artifacts.store.store import Store
from artifacts.traces.trace import PHASES
from profilers.routing.observe import RoutingProfile


def tables(profile: RoutingProfile) -> dict[str, pa.Table]:
    """Return the rows of `activations`, `coactivations` and `entropy`."""
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
    """Return the profile that a run wrote."""
    size = (shape.num_layers, shape.num_experts)
    use = activation_matrices(store.read("activations", run_id), *size)
    pairs, weighted = coactivation_matrices(store.read("coactivations", run_id), *size)
    return RoutingProfile.from_arrays(
        {
            "use": np.stack([use[phase][0] for phase in PHASES], axis=1),
            "share": np.stack([use[phase][1] for phase in PHASES], axis=1),
            "pairs": pairs,
            "weighted": weighted,
            "entropy": np.stack(store.read("entropy", run_id)["histogram"].to_numpy()),
        }
    )

"""Fitted predictors as sheets: their recall beside that of the next router and of controls."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from moectl.show.render import Sheet


def distances(recalls: Mapping[str, np.ndarray], *, note: str = "") -> Sheet:
    """Mean recall@k by distance, apart for target layers in this pass and in the next; recalls [L,
    D] by predictor."""
    rows = []
    num_layers, num_distances = next(iter(recalls.values())).shape
    for ahead in range(num_distances):
        is_next = np.arange(num_layers) + ahead + 1 >= num_layers
        for where, layers in (("this pass", ~is_next), ("next pass", is_next)):
            if layers.any():
                rows.append(
                    (
                        ahead + 1,
                        where,
                        *(values[layers, ahead].mean() for values in recalls.values()),
                    )
                )
    return Sheet(
        "Recall of the k experts that come, by layers ahead",
        ("distance", "target in", *recalls),
        rows,
        note,
    )


def layers(
    recalls: Mapping[str, np.ndarray], target: np.ndarray, layer: int | None = None
) -> Sheet:
    """Recall@k by layer and distance, and the target of each fit; of one layer if it is named."""
    rows = [
        (at, ahead + 1, target[at, ahead], *(values[at, ahead] for values in recalls.values()))
        for at, ahead in np.ndindex(target.shape)
        if layer in (None, at)
    ]
    return Sheet("Fitted predictors", ("layer", "distance", "fitted to", *recalls), rows)


def stored(
    rows: pa.Table, num_layers: int, share: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Recalls [L, D] by predictor and targets [L, D] of rows of `predictors`; `share` is the recall
    by chance."""
    order = np.lexsort((rows["distance"].to_numpy(), rows["layer"].to_numpy()))
    size = (num_layers, -1)
    names = {
        "learned": "recall",
        "next_gate": "next_gate_recall",
        "most frequent": "frequent_recall",
    }
    recalls = {name: rows[column].to_numpy()[order].reshape(size) for name, column in names.items()}
    target = np.array(rows["target"].to_pylist())[order].reshape(size)
    return recalls | {"random": np.full(target.shape, share)}, target

"""Expert maps as a sheet and a heatmap: how much more certain one iteration is than the mean of
all."""

import numpy as np

from moectl.show.artefact import View
from moectl.show.render import Heatmap, Sheet


def maps(probabilities: np.ndarray, top_k: int, layer: int | None) -> View:
    """One row for each layer, or for each expert of `layer`; probabilities [N, L, E] of N maps."""
    mean = probabilities.mean(axis=0)
    heatmap = Heatmap("Mean probability over the maps", mean, "layers", "experts")
    chosen = np.argsort(-probabilities, axis=2, kind="stable")[:, :, :top_k]
    if layer is not None:
        selected = np.bincount(chosen[:, layer].ravel(), minlength=probabilities.shape[2]) / len(
            probabilities
        )
        most = probabilities[:, layer].max(axis=0)
        rows = list(zip(range(len(selected)), mean[layer], most, selected, strict=True))
        columns = (
            "expert",
            "mean probability",
            "largest",
            f"share of maps with it among the top {top_k}",
        )
        title = f"Experts of layer {layer} in {len(probabilities):,} maps"
        return Sheet(title, columns, rows), heatmap
    coarse = _entropy(mean)
    fine = _entropy(probabilities).mean(axis=0)
    mass = np.take_along_axis(probabilities, chosen, axis=2).sum(axis=2).mean(axis=0)
    rows = list(zip(range(len(coarse)), coarse, fine, mass, strict=True))
    columns = ("layer", "coarse entropy", "fine entropy", f"mean probability of the top {top_k}")
    note = "entropies over ln E; coarse: of the mean of all maps, fine: the mean over maps"
    return Sheet(f"{len(probabilities):,} expert maps", columns, rows, note), heatmap


def _entropy(p: np.ndarray) -> np.ndarray:
    """Entropies [*] over ln E, in [0, 1], of distributions [*, E]; 0 for a single expert."""
    nats = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    return nats / np.log(p.shape[-1]) if p.shape[-1] > 1 else nats

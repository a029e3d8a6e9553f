"""Expert maps as a sheet and a heatmap: how much more one iteration says than all of them together."""

import numpy as np

from moectl.show.render import Heatmap, Sheet


def maps(probabilities: np.ndarray, top_k: int, layer: int | None) -> Sheet:
    """By layer, or every expert of one; probabilities [N, L, E] of the maps."""
    chosen = np.argsort(-probabilities, axis=2, kind="stable")[:, :, :top_k]
    if layer is not None:
        use = np.bincount(chosen[:, layer].ravel(), minlength=probabilities.shape[2]) / len(probabilities)
        one = probabilities[:, layer]
        rows = list(zip(range(len(use)), one.mean(axis=0), one.max(axis=0), use, strict=True))
        columns = ("expert", "mean probability", "largest", f"share of maps with it among the top {top_k}")
        return Sheet(f"Experts of layer {layer} in {len(probabilities):,} maps", columns, rows)
    coarse, fine = _entropy(probabilities.mean(axis=0)), _entropy(probabilities).mean(axis=0)
    mass = np.take_along_axis(probabilities, chosen, axis=2).sum(axis=2).mean(axis=0)
    rows = list(zip(range(len(coarse)), coarse, fine, mass, strict=True))
    columns = ("layer", "coarse entropy", "fine entropy", f"mean probability of the top {top_k}")
    note = "entropies over ln E; coarse: of the mean of all maps, fine: the mean over maps"
    return Sheet(f"{len(probabilities):,} expert maps", columns, rows, note)


def maps_heatmap(probabilities: np.ndarray) -> Heatmap:
    """Mean probability by layer and expert."""
    return Heatmap("Mean probability over the maps", probabilities.mean(axis=0), "layers", "experts")


def _entropy(p: np.ndarray) -> np.ndarray:
    """[*] in [0, 1] of distributions [*, E]; 0 where there is one expert."""
    nats = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    return nats / np.log(p.shape[-1]) if p.shape[-1] > 1 else nats

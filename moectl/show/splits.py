"""Hit-rate curves and expert splits, as sheets and heatmaps."""

from dataclasses import replace

import numpy as np

from artifacts.splits.solve import Answer
from artifacts.store.rows import curve_matrices
from moectl.show.artefact import Artefact, View
from moectl.show.grounds import Grounds
from moectl.show.render import Heatmap, Sheet

Curves = tuple[np.ndarray, np.ndarray, np.ndarray]
"""hit [L, E + 1], prediction [L, E], prediction_hit [L, E, E + 1]."""

_SHARES = (0.125, 0.25, 0.5, 0.75)
_RANKS = 4
_BAR = 32  # characters


def curves(artefact: Artefact) -> View:
    """One row for each layer, or for each number of cached experts of one layer.

    The heatmap has the hit rate by layer and cached experts, or of one layer how often each
    predicted expert is cached.
    """
    layer = artefact.layer
    hit, prediction, cached = curve_matrices(artefact.read("curves"), *artefact.size)
    num_experts = prediction.shape[1]
    if layer is not None:
        columns = ("cached experts", "hit rate", "first predicted is cached")
        rows = list(zip(range(num_experts + 1), hit[layer], cached[layer, 0], strict=True))
        title = f"Predicted experts cached, layer {layer}"
        heatmap = Heatmap(title, cached[layer], "rank of the prediction", "cached experts")
        return Sheet(f"Curves, layer {layer}", columns, rows), heatmap
    sizes = [round(share * num_experts) for share in _SHARES]
    ranks = range(min(_RANKS, num_experts))
    columns = (
        "layer",
        *(f"hits with {size}" for size in sizes),
        *(f"prediction {rank} right" for rank in ranks),
    )
    rows = [(number, *hit[number, sizes], *prediction[number, ranks]) for number in range(len(hit))]
    note = "hits: rate with so many experts cached under lcp"
    heatmap = Heatmap("Hit rate", hit, "layer", "cached experts")
    return Sheet("Curves", columns, rows, note), heatmap


def splits(answer: Answer, known: Curves, on: Grounds, *, title: str, note: str = "") -> Sheet:
    """One row for each layer. Where times mean nothing by themselves, the layer's share of all
    waiting is shown."""
    budgets, exposed, theta, cache_size = answer
    hit = known[0][np.arange(len(budgets)), cache_size]
    first = known[1][:, 0]
    columns = (
        "layer",
        "budget",
        "cached experts",
        "theta",
        "hit rate",
        "first prediction",
        "exposed ms",
    )
    share = exposed / max(float(exposed.sum()), np.finfo(float).tiny)
    values = (budgets, cache_size, theta, hit, first, exposed * 1e3, share)
    rows = list(zip(range(len(budgets)), *values, strict=True))
    unshown = ("share of the waiting",) if on.is_absolute else ("exposed ms",)
    below = "\n".join(filter(None, (note, on.says)))
    return Sheet(title, (*columns, "share of the waiting"), rows, below, unshown)


def with_bars(sheet: Sheet, num_experts: int) -> Sheet:
    """A sheet of splits with a bar of each layer's experts: the share in its budget, the share cut
    off its cached experts, and the share of experts that are not cached."""
    scale = _BAR / num_experts
    drawn = []
    for row in sheet.rows:
        held = round(row[1] * scale)
        cached = round(row[2] * scale)
        drawn.append((*row, "█" * held + "░" * (cached - held) + "·" * (_BAR - cached)))
    return replace(sheet, columns=(*sheet.columns, "resident, split off, absent"), rows=drawn)


def splits_heatmap(answer: Answer, num_experts: int) -> Heatmap:
    """Theta of each place, 0 for places beyond a layer's cache size."""
    _, _, theta, cache_size = answer
    values = np.where(np.arange(num_experts) < cache_size[:, None], theta[:, None], 0.0)
    return Heatmap("Theta of cached experts", values, "layer", "place")

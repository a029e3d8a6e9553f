"""The contents of a store, as sheets and heatmaps."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from artifacts.routing.coactivation import conditional
from artifacts.routing.similarity import Similarity
from artifacts.store.rows import (
    activation_matrices,
    buddy_matrices,
    coactivation_matrices,
    entropy_percentiles,
    similarity_matrices,
)
from artifacts.store.runs import ModelInfo, StoredRun, TableSize
from moectl.show.artefact import Artefact, View
from moectl.show.render import Heatmap, NumBytes, Sheet

_LEVELS = [0, 5, 15, 25, 50, 75, 85, 95, 100]
_MOST_PAIRS = 32
_HOTTEST = 4
_BEST_LOSS = (
    "best loss: of the stand-in that changes the layer's output least, over that of leaving the "
    "expert out"
)


def runs(stored: Sequence[StoredRun], models: Sequence[ModelInfo]) -> Sheet:
    """One row for each run, oldest first."""
    names = {model.model_id: model.name for model in models}
    columns = ("run", "command", "model", "data", "tokens", "seconds", "started (UTC)", "wrote")
    rows = [
        (
            run.run_id,
            run.info.command,
            names.get(run.info.model_id, "-"),
            run.info.data or "-",
            run.info.tokens,
            run.info.seconds,
            f"{run.info.started_at:%Y-%m-%d %H:%M:%S}",
            ", ".join(f"{size.num_rows:,} {name}" for name, size in run.contents.items()) or "-",
        )
        for run in stored
    ]
    return Sheet("Runs", columns, rows)


def models(stored: Sequence[ModelInfo]) -> Sheet:
    """One row for each model."""
    columns = ("model", "id", "family", "layers", "experts", "top-k", "expert")
    rows = []
    for model in stored:
        shape = model.shape
        counts = (shape.num_layers, shape.num_experts, shape.top_k)
        rows.append(
            (model.name, model.model_id, model.family, *counts, NumBytes(shape.expert_nbytes))
        )
    return Sheet("Models", columns, rows)


def artefacts(sizes: dict[str, TableSize], *, title: str) -> Sheet:
    """Rows and uncompressed bytes by kind of artefact."""
    rows = [(name, size.num_rows, NumBytes(size.nbytes)) for name, size in sizes.items()]
    return Sheet(title, ("artefact", "rows", "uncompressed"), rows)


def activations(artefact: Artefact) -> View:
    """Use of experts: one row for each layer, or for each expert of one layer."""
    by_phase = activation_matrices(artefact.read("activations"), *artefact.size)
    counts = sum(count for count, _ in by_phase.values())
    heatmap = Heatmap("Tokens by layer and expert", counts, "layers", "experts")
    if artefact.layer is not None:
        return _experts(by_phase, counts[artefact.layer], artefact.layer), heatmap
    columns = ("layer", "tokens", "never used", "most used", "their share", "evenness")
    rows = [
        (index, count.sum() // artefact.shape.top_k, (count == 0).sum(), *_most_used(count))
        for index, count in enumerate(counts)
    ]
    note = (
        f"most used: the {_HOTTEST} experts selected most; evenness: entropy of use, 1 when all "
        "are used the same"
    )
    return Sheet("Use of experts by layer", columns, rows, note), heatmap


def coactivation(artefact: Artefact) -> View:
    """Strongest pairs: a few of each layer, or many of one layer; q of that layer, or of layer
    0."""
    pairs, weighted = coactivation_matrices(artefact.read("coactivations"), *artefact.size)
    layer = artefact.layer
    most = _HOTTEST if layer is None else _MOST_PAIRS
    rows = []
    for index in artefact.layers:
        q = conditional(pairs[index])
        upper = np.triu(pairs[index])
        order = np.argsort(-upper, axis=None, kind="stable")[:most]
        for i, j in zip(*np.unravel_index(order, upper.shape), strict=True):
            if upper[i, j]:
                rows.append((index, i, j, upper[i, j], weighted[index, i, j], q[i, j], q[j, i]))
    columns = ("layer", "i", "j", "tokens", "weight", "q[j|i]", "q[i|j]")
    shown = layer or 0
    heatmap = Heatmap(f"q[j|i] in layer {shown}", conditional(pairs[shown]), "i", "experts j")
    return Sheet("Experts most often selected together", columns, rows), heatmap


def entropy(artefact: Artefact) -> View:
    """Percentiles of token activating entropy: some of each layer; all of them in the heatmap."""
    percentiles = entropy_percentiles(artefact.read("entropy"))
    rows = [(index, *percentiles[index, _LEVELS].tolist()) for index in artefact.layers]
    columns = ("layer", *(f"p{level}" for level in _LEVELS))
    title = "Token activating entropy by layer and percentile"
    return (
        Sheet("Token activating entropy, percentiles", columns, rows),
        Heatmap(title, percentiles, "layers", "percentiles"),
    )


def similarity(artefact: Artefact) -> View:
    """Return the similarity of experts, and the loss by the best stand-in over the loss by leaving
    the expert out.

    One row for each layer, or for each expert of one layer. The heatmap has the losses by
    stand-ins in that layer, or in layer 0, over the losses by leaving the expert out.
    """
    measured = similarity_matrices(artefact.read("similarity"), *artefact.size)
    left_out = measured.left_out
    off = ~np.eye(artefact.shape.num_experts, dtype=bool)
    loss = np.where(off, measured.loss, np.inf)
    best = np.divide(loss.min(axis=2), left_out, out=np.ones_like(left_out), where=left_out > 0)
    layer = artefact.layer
    shown = layer or 0
    share = measured.loss[shown] / np.maximum(left_out[shown], np.finfo(float).tiny)[:, None]
    title = f"Loss over that of leaving out, layer {shown}"
    heatmap = Heatmap(title, share, "experts i", "stand-ins j")
    if layer is None:
        sheet = _worth([pairs[off] for pairs in measured.cosine], best)
    else:
        sheet = _stand_ins(measured, loss[layer].argmin(axis=1), best[layer], layer)
    return replace(sheet, note=_BEST_LOSS), heatmap


def _worth(cosines: Sequence[np.ndarray], best: np.ndarray) -> Sheet:
    """A row for each layer, from the cosines of its pairs [P] and its best losses [L, E]."""
    rows = [
        (
            layer,
            float(pairs.mean()),
            float(pairs.max()),
            float(np.median(share)),
            float((share < 1).mean()),
        )
        for layer, (pairs, share) in enumerate(zip(cosines, best, strict=True))
    ]
    columns = (
        "layer",
        "mean cosine",
        "largest cosine",
        "median best loss",
        "experts with a stand-in better than none",
    )
    return Sheet("What experts are worth in each other's place", columns, rows)


def _stand_ins(measured: Similarity, buddies: np.ndarray, best: np.ndarray, layer: int) -> Sheet:
    rows = [
        (
            expert,
            measured.samples[layer, expert],
            buddy,
            measured.cosine[layer, expert, buddy],
            share,
        )
        for expert, (buddy, share) in enumerate(zip(buddies.tolist(), best, strict=True))
    ]
    columns = ("expert", "samples", "best", "cosine", "best loss")
    return Sheet(f"Stand-ins in layer {layer}", columns, rows)


def buddy_sizes(table: np.ndarray, q: np.ndarray, alphas: Sequence[float]) -> Sheet:
    """Lengths of the buddy lists of each layer, and the share of their metric that they cover, over
    active pivots.

    `table` and `q` [L, E, R] as `artifacts.store.rows.buddy_matrices` gives them.
    """
    rows = []
    for layer, (lists, shares) in enumerate(zip(table, q, strict=True)):
        sizes = (lists >= 0).sum(axis=1)
        is_active = sizes > 0
        if not is_active.any():
            rows.append((layer, alphas[layer], 0, 0.0, 0.0, 0, 0.0, len(sizes)))
            continue
        active = sizes[is_active]
        middle = float(np.median(active))
        mean = float(active.mean())
        reach = float(shares[is_active].sum(axis=1).mean())
        told = (active.min(), middle, mean, active.max(), reach, (~is_active).sum())
        rows.append((layer, alphas[layer], *told))
    columns = ("layer", "alpha", "min", "median", "mean", "max", "covered q", "never active")
    return Sheet("Buddies per expert", columns, rows)


def buddies(artefact: Artefact) -> View:
    """The sizes of lists by layer, or each list of one layer. The heatmap has list sizes by layer
    and pivot, or q by pivot and buddy."""
    table, q = buddy_matrices(artefact.read("buddies"), *artefact.size)
    layer = artefact.layer
    if layer is None:
        sizes = (table >= 0).sum(axis=2)
        heatmap = Heatmap("Buddies by layer and pivot", sizes, "layers", "pivots")
        return buddy_sizes(table, q, artefact.run.info.parameters["alpha"]), heatmap
    rows = [
        (pivot, *_list(named, shares))
        for pivot, (named, shares) in enumerate(zip(table[layer], q[layer], strict=True))
    ]
    spread = np.zeros((table.shape[1], table.shape[1]))
    pivot, rank = np.nonzero(table[layer] >= 0)
    spread[pivot, table[layer, pivot, rank]] = q[layer, pivot, rank]
    heatmap = Heatmap(f"q of buddies in layer {layer}", spread, "pivots", "buddies")
    columns = ("pivot", "size", "covered q", "buddies (q)")
    return Sheet(f"Buddies in layer {layer}", columns, rows), heatmap


def _list(row: np.ndarray, q: np.ndarray) -> tuple[int, float, str]:
    size = int((row >= 0).sum())
    named = " ".join(
        f"{buddy} ({share:.3f})" for buddy, share in zip(row[:size], q[:size], strict=True)
    )
    return size, float(q.sum()), named or "-"


def _experts(
    by_phase: dict[str, tuple[np.ndarray, np.ndarray]], count: np.ndarray, layer: int
) -> Sheet:
    total = max(int(count.sum()), 1)
    weight = sum(weight for _, weight in by_phase.values())[layer]
    rows = [
        (
            expert,
            count[expert],
            count[expert] / total,
            *(part[layer, expert] for part, _ in by_phase.values()),
            mean,
        )
        for expert, mean in enumerate(
            np.divide(weight, count, out=np.zeros(len(count)), where=count > 0)
        )
    ]
    return Sheet(
        f"Experts of layer {layer}", ("expert", "tokens", "share", *by_phase, "mean weight"), rows
    )


def _most_used(count: np.ndarray) -> tuple[str, float, float]:
    """Return the experts of a layer that are selected most, their share, and the evenness of
    use."""
    hottest = np.argsort(-count, kind="stable")[:_HOTTEST]
    share = count[hottest].sum() / max(int(count.sum()), 1)
    return " ".join(map(str, hottest)), share, _evenness(count)


def _evenness(count: np.ndarray) -> float:
    share = count[count > 0] / max(int(count.sum()), 1)
    return float(-(share * np.log(share)).sum() / np.log(len(count))) if len(count) > 1 else 0.0

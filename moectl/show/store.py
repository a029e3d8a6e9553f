"""The contents of a store, as sheets and heatmaps."""

from collections.abc import Sequence

import numpy as np

from artifacts.routing.coactivation import conditional
from artifacts.routing.similarity import Similarity
from artifacts.shape import Shape
from artifacts.store.runs import ModelInfo, StoredRun, TableSize
from moectl.show.render import Heatmap, NumBytes, Sheet

_LEVELS = (0, 5, 15, 25, 50, 75, 85, 95, 100)
_MOST_PAIRS = 32
_HOTTEST = 4


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


def activations(
    by_phase: dict[str, tuple[np.ndarray, np.ndarray]], shape: Shape, layer: int | None
) -> Sheet:
    """Use of experts: one row for each layer, or for each expert of `layer`."""
    counts = sum(count for count, _ in by_phase.values())
    if layer is not None:
        return _experts(by_phase, counts[layer], layer)
    columns = ("layer", "tokens", "never used", "most used", "their share", "evenness")
    rows = []
    for index, count in enumerate(counts):
        total = max(int(count.sum()), 1)
        hottest = np.argsort(-count, kind="stable")[:_HOTTEST]
        share = count[hottest].sum() / total
        tokens = count.sum() // shape.top_k
        rows.append(
            (
                index,
                tokens,
                (count == 0).sum(),
                " ".join(map(str, hottest)),
                share,
                _evenness(count),
            )
        )
    note = (
        f"most used: the {_HOTTEST} experts selected most; evenness: entropy of use, 1 when all "
        "are used the same"
    )
    return Sheet("Use of experts by layer", columns, rows, note)


def activations_heatmap(by_phase: dict[str, tuple[np.ndarray, np.ndarray]]) -> Heatmap:
    """Tokens by layer and expert."""
    counts = sum(count for count, _ in by_phase.values())
    return Heatmap("Tokens by layer and expert", counts, "layers", "experts")


def coactivation(pairs: np.ndarray, weighted: np.ndarray, layer: int | None) -> Sheet:
    """Strongest pairs: a few of each layer, or many of `layer`."""
    chosen = range(len(pairs)) if layer is None else [layer]
    most = _HOTTEST if layer is None else _MOST_PAIRS
    rows = []
    for index in chosen:
        q = conditional(pairs[index])
        upper = np.triu(pairs[index])
        order = np.argsort(-upper, axis=None, kind="stable")[:most]
        for i, j in zip(*np.unravel_index(order, upper.shape), strict=True):
            if upper[i, j]:
                rows.append((index, i, j, upper[i, j], weighted[index, i, j], q[i, j], q[j, i]))
    columns = ("layer", "i", "j", "tokens", "weight", "q[j|i]", "q[i|j]")
    return Sheet("Experts most often selected together", columns, rows)


def coactivation_heatmap(pairs: np.ndarray, layer: int | None) -> Heatmap:
    """q of `layer`, or of layer 0."""
    index = layer or 0
    return Heatmap(f"q[j|i] in layer {index}", conditional(pairs[index]), "i", "experts j")


def entropy(percentiles: np.ndarray, layer: int | None) -> Sheet:
    """Percentiles of token activating entropy."""
    chosen = range(len(percentiles)) if layer is None else [layer]
    rows = [(index, *(float(percentiles[index, level]) for level in _LEVELS)) for index in chosen]
    return Sheet(
        "Token activating entropy, percentiles",
        ("layer", *(f"p{level}" for level in _LEVELS)),
        rows,
    )


def entropy_heatmap(percentiles: np.ndarray) -> Heatmap:
    """All percentiles by layer."""
    return Heatmap(
        "Token activating entropy by layer and percentile", percentiles, "layers", "percentiles"
    )


def similarity(measured: Similarity, layer: int | None) -> Sheet:
    """Return the similarity of experts, and the loss by the best stand-in over the loss by leaving
    the expert out.

    One row for each layer, or for each expert of `layer`.
    """
    loss = np.where(np.eye(measured.loss.shape[1], dtype=bool), np.inf, measured.loss)
    best = np.divide(
        loss.min(axis=2),
        measured.left_out,
        out=np.ones_like(measured.left_out),
        where=measured.left_out > 0,
    )
    note = (
        "best loss: of the stand-in that changes the layer's output least, over that of leaving "
        "the expert out"
    )
    if layer is not None:
        rows = [
            (
                expert,
                measured.samples[layer, expert],
                int(buddy),
                measured.cosine[layer, expert, buddy],
                share,
            )
            for expert, (buddy, share) in enumerate(
                zip(loss[layer].argmin(axis=1), best[layer], strict=True)
            )
        ]
        return Sheet(
            f"Stand-ins in layer {layer}",
            ("expert", "samples", "best", "cosine", "best loss"),
            rows,
            note,
        )
    off = ~np.eye(loss.shape[1], dtype=bool)
    rows = [
        (
            index,
            float(cosine[off].mean()),
            float(cosine[off].max()),
            float(np.median(share)),
            float((share < 1).mean()),
        )
        for index, (cosine, share) in enumerate(zip(measured.cosine, best, strict=True))
    ]
    columns = (
        "layer",
        "mean cosine",
        "largest cosine",
        "median best loss",
        "experts with a stand-in better than none",
    )
    return Sheet("What experts are worth in each other's place", columns, rows, note)


def similarity_heatmap(measured: Similarity, layer: int | None) -> Heatmap:
    """Losses by stand-ins in `layer`, or in layer 0, over the losses by leaving the expert out."""
    index = layer or 0
    share = (
        measured.loss[index] / np.maximum(measured.left_out[index], np.finfo(float).tiny)[:, None]
    )
    return Heatmap(
        f"Loss over that of leaving out, layer {index}", share, "experts i", "stand-ins j"
    )


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
        rows.append(
            (
                layer,
                alphas[layer],
                active.min(),
                middle,
                mean,
                active.max(),
                reach,
                (~is_active).sum(),
            )
        )
    columns = ("layer", "alpha", "min", "median", "mean", "max", "covered q", "never active")
    return Sheet("Buddies per expert", columns, rows)


def buddies(table: np.ndarray, q: np.ndarray, layer: int) -> Sheet:
    """Each list of one layer."""
    rows = [
        (pivot, *_list(table[layer, pivot], q[layer, pivot])) for pivot in range(table.shape[1])
    ]
    return Sheet(f"Buddies in layer {layer}", ("pivot", "size", "covered q", "buddies (q)"), rows)


def buddies_heatmap(table: np.ndarray, q: np.ndarray, layer: int | None) -> Heatmap:
    """List sizes by layer and pivot, or q by pivot and buddy in `layer`."""
    if layer is None:
        return Heatmap("Buddies by layer and pivot", (table >= 0).sum(axis=2), "layers", "pivots")
    spread = np.zeros((table.shape[1], table.shape[1]))
    pivot, rank = np.nonzero(table[layer] >= 0)
    spread[pivot, table[layer, pivot, rank]] = q[layer, pivot, rank]
    return Heatmap(f"q of buddies in layer {layer}", spread, "pivots", "buddies")


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


def _evenness(count: np.ndarray) -> float:
    share = count[count > 0] / max(int(count.sum()), 1)
    return float(-(share * np.log(share)).sum() / np.log(len(count))) if len(count) > 1 else 0.0

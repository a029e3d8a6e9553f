"""Rows of replicas and of their quantisation loss, as sheets and heatmaps."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from artifacts.quantisation.widths import Width, as_width, columns_of
from artifacts.store.rows import quant_loss_matrices
from moectl.show.artefact import Artefact, View
from moectl.show.render import Heatmap, NumBytes, Sheet


def quant_loss(artefact: Artefact) -> View:
    """Relative error of experts' outputs by width: means of each layer, or each expert of one
    layer. The heatmap has the error at the smallest width."""
    rows = artefact.read("quant_loss")
    widths = _widths(rows)
    relative = quant_loss_matrices(rows, *artefact.size)["relative"][:, :, columns_of(widths)]
    samples = _by_expert(rows, "samples", artefact.size)
    is_own = _by_expert(rows, "is_own", artefact.size) != 0
    names = tuple(f"{bits} bits" for bits in widths)
    title = f"Relative error at {widths[0]} bits"
    heatmap = Heatmap(title, relative[:, :, 0], "layers", "experts")
    layer = artefact.layer
    if layer is None:
        borrowing = (~is_own).sum(axis=1).tolist()
        means, worst = (of(axis=1).tolist() for of in (relative.mean, relative.max))
        cells = [
            (index, *means[index], *worst[index], borrowing[index]) for index in range(len(means))
        ]
        columns = ("layer", *names, *(f"worst, {name}" for name in names), "borrowing")
        note = (
            "mean square of the error over that of the output; borrowing: experts judged on their "
            "layer's tokens"
        )
        return Sheet("Relative error of experts' outputs", columns, cells, note), heatmap
    told = zip(
        samples[layer].tolist(), is_own[layer].tolist(), relative[layer].tolist(), strict=True
    )
    cells = [(expert, count, own, *errors) for expert, (count, own, errors) in enumerate(told)]
    columns = ("expert", "tokens", "judged on own", *names)
    return Sheet(f"Relative error in layer {layer}", columns, cells), heatmap


def replicas(rows: pa.Table, layer: int | None, *, verified: bool, checkpoint: str) -> Sheet:
    """Bytes by width, or each file of `layer`. `checkpoint` says how the checkpoint has its
    experts."""
    checked = (
        f"all {len(set(rows['file'].to_pylist())):,} files are what was written" if verified else ""
    )
    files = rows.to_pylist()
    if layer is not None:
        cells = [
            (
                row["expert"],
                as_width(row["bits"]),
                NumBytes(row["nbytes"]),
                row["file"],
                row["hash"][:16],
            )
            for row in files
            if row["layer"] == layer
        ]
        return Sheet(
            f"Replicas in layer {layer}",
            ("expert", "bits", "bytes", "file", "sha256"),
            cells,
            checked,
        )
    cells = [
        (bits, len(sizes), NumBytes(sizes[0]), NumBytes(sum(sizes)))
        for bits, sizes in _by_width(files)
    ]
    note = "; ".join(filter(None, (f"an expert of the checkpoint: {checkpoint}", checked)))
    return Sheet("Replicas", ("bits", "experts", "an expert", "all"), cells, note)


def replicas_heatmap(rows: pa.Table, size: tuple[int, int]) -> Heatmap:
    """Bytes of all widths, by layer and expert."""
    totals = np.zeros(size)
    np.add.at(totals, (_column(rows, "layer"), _column(rows, "expert")), _column(rows, "nbytes"))
    return Heatmap("Bytes of replicas", totals, "layers", "experts")


def _by_width(files: Sequence[dict]) -> list[tuple[Width, list[int]]]:
    widths = sorted({as_width(row["bits"]) for row in files})
    return [(bits, [row["nbytes"] for row in files if row["bits"] == bits]) for bits in widths]


def _by_expert(rows: pa.Table, name: str, size: tuple[int, int]) -> np.ndarray:
    """A column [L, E] whose values are equal at all widths."""
    values = np.zeros(size, np.int64)
    column = (
        np.array(rows["basis"].to_pylist()) == "own" if name == "is_own" else _column(rows, name)
    )
    values[_column(rows, "layer"), _column(rows, "expert")] = column
    return values


def _widths(rows: pa.Table) -> list[Width]:
    return sorted({as_width(bits) for bits in rows["bits"].to_pylist()})


def _column(rows: pa.Table, name: str) -> np.ndarray:
    return rows[name].to_numpy().astype(np.int64)

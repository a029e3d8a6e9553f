"""Pictures of results, as SVG or PNG (extra: report)."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadInput, BadUsage
from moectl.show.render import Heatmap

_FORMATS = (".svg", ".png")
_COMPUTE, _STALL, _INK = "#3b6ea5", "#e07b39", "#24292f"


def check_picture(path: Path) -> None:
    """Raise BadUsage or BadInput, before the work, when a picture could not be written after it."""
    if path.suffix not in _FORMATS:
        raise BadUsage(f"a picture is written as {' or '.join(_FORMATS)}, not {path.suffix or path.name!r}")
    if find_spec("matplotlib") is None:
        raise BadInput("pictures need matplotlib: pip install 'moectl[report]'")
    check_writable(path)


def draw_heatmap(heatmap: Heatmap, path: Path) -> None:
    """The matrix from 0 to its largest, with what its rows and columns are; where a few values would leave all others
    dark, the scale ends before them, in an arrow."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    down, across = heatmap.values.shape
    figure = Figure(figsize=(8, min(8, max(2.4, 1.2 + 6.5 * down / across))), layout="constrained", facecolor="white")
    axes = figure.subplots()
    values = heatmap.values.astype(float)
    usual, largest = np.percentile(values, 90), values.max()
    is_cut = 0 < usual * 10 < largest
    scale = {"vmin": 0, "vmax": usual if is_cut else largest}
    image = axes.imshow(values, aspect="auto", cmap="inferno", interpolation="nearest", **scale)
    figure.colorbar(image, ax=axes, pad=0.01, extend="max" if is_cut else "neither")
    axes.set_xlabel(heatmap.column_name)
    axes.set_ylabel(heatmap.row_name)
    axes.set_title(heatmap.title, loc="left", fontsize=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    with replacing(path) as temporary, rc_context({"svg.fonttype": "none"}):
        figure.savefig(temporary, format=path.suffix[1:], dpi=150, metadata=_undated(path))


def _undated(path: Path) -> dict[str, None] | None:
    """The same picture is the same bytes."""
    return {"Date": None} if path.suffix == ".svg" else None


@dataclass(frozen=True, slots=True)
class Row:
    """One preset on the held-out text."""

    preset: str
    hit_rate: float
    moved_bytes: int
    exposed_ms: float
    ms_per_token: float
    perplexity_ratio: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The table and the conditions it was measured under."""

    rows: list[Row]
    budget: str
    conditions: str
    receipts: dict[str, dict[str, object]]


def draw_demo(demonstration: Demonstration, path: Path) -> None:
    """Time per token of each preset, the stall in it marked, with hit rate and quality beside."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.62 * len(demonstration.rows) + 1.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for place, row in enumerate(demonstration.rows):
        stall = min(row.exposed_ms, row.ms_per_token)
        axes.barh(place, row.ms_per_token - stall, color=_COMPUTE, height=0.6)
        axes.barh(place, stall, left=row.ms_per_token - stall, color=_STALL, height=0.6)
        text = f" {row.ms_per_token:.1f} ms · hits {row.hit_rate:.0%} · top-1 {row.top1_agreement:.1%}"
        axes.text(row.ms_per_token, place, text, va="center", color=_INK, fontsize=9)
    axes.set_yticks(range(len(demonstration.rows)), [row.preset for row in demonstration.rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(row.ms_per_token for row in demonstration.rows) * 1.65)
    axes.set_xlabel("milliseconds per token: compute (blue), waiting for experts (orange)")
    axes.set_title(f"{demonstration.budget} of the experts in the fast tier", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary, rc_context({"svg.fonttype": "none"}):  # text as text: a tenth of the size
        figure.savefig(temporary, format=path.suffix[1:], metadata=_undated(path))

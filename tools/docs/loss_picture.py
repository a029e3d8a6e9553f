"""The picture of what experts lose in few bits, from the tables that stand in docs/lab/quantisation.md.

python -m tools.docs.loss_picture   draws docs/pictures/bits-and-loss.svg
"""

import re
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from moectl.charts.pictures import write_picture
from moectl.charts.plots import WIDTH, Line, lines
from moectl.charts.scales import AxisScale, Drawing, Frame, log_scale
from tools import ROOT

PAGE = ROOT / "docs" / "lab" / "quantisation.md"
PICTURE = ROOT / "docs" / "pictures" / "bits-and-loss.svg"
MODELS = {
    "bundled": "the bundled model, experts of 128 x 32",
    "lab": "the second model, experts of 128 x 96",
    "narrow": "the third model, experts of 96 x 64",
}
"""The sections of the page, `shares-NAME`, by what their panels are called."""

_RECIPES = {
    "trellis": ("trellis", "strong"),
    "refined": ("GPTQ, refined", "warm"),
    "plain": ("GPTQ, plain", "quiet"),
}
_TICKS = (1, 1.5, 2, 2.5, 3)
# pixels between names and between panels
_LINE = 14.0
_GAP = 8.0


@dataclass(frozen=True, slots=True)
class Row:
    """All experts of a model at `bits` bits a weight, scales counted, and the KL divergence in nats
    a token."""

    recipe: str
    bits: float
    kl: float


def read(page: str) -> dict[str, list[Row]]:
    """The rows of every model's table with layers weighed by the ramp, by the names of `MODELS`."""
    return {name: _rows(page, name) for name in MODELS}


def drawing(models: dict[str, list[Row]]) -> Drawing:
    """A panel for each model, one below another on equal scales; a line for each recipe, with its
    name at its end."""
    rows = [row for own in models.values() for row in own]
    frame = Frame(width=WIDTH, height=232, right=96, top=24)
    most = max(row.bits for row in rows)
    x = log_scale([row.bits for row in rows], name="bits a weight, scales counted", **frame.across)
    x = replace(x, ticks=tuple((bits, f"{bits:g}") for bits in _TICKS if bits < 1.25 * most))
    y = log_scale([row.kl for row in rows], name="KL, nats a token", **frame.upwards)
    panels = [
        (
            '<g transform="translate(0 '
            f'{number * (frame.height + _GAP):g})">{_panel(MODELS[name], own, x, y, frame)}</g>'
        )
        for number, (name, own) in enumerate(models.items())
    ]
    title = "What experts lose in few bits"
    says = "; ".join(
        f"{MODELS[name]}, {_RECIPES[recipe][0]}: "
        + ", ".join(f"{row.kl:g} at {row.bits:.2f} bits" for row in group)
        for name, own in models.items()
        for recipe, group in groupby(own, key=lambda row: row.recipe)
    )
    return Drawing(
        title,
        "".join(panels),
        frame.width,
        len(panels) * (frame.height + _GAP),
        f"{title}: KL of {says}",
    )


def _rows(page: str, name: str) -> list[Row]:
    table = page.partition(f"<!-- shares-{name}: -->")[2].partition(f"<!-- :shares-{name} -->")[0]
    head, _, *rows = [
        re.split(r"\s*\|\s*", line.strip("| "))
        for line in table.splitlines()
        if line.startswith("|")
    ]
    records = [dict(zip(head, row, strict=True)) for row in rows]
    return [
        Row(record["recipe"], 16 * float(record["bytes"].rstrip("%")) / 100, float(record["KL"]))
        for record in records
        if record["layers weighed"] == "ramp"
    ]


def _panel(name: str, rows: list[Row], x: AxisScale, y: AxisScale, frame: Frame) -> str:
    curves = {
        recipe: sorted((row.bits, row.kl) for row in group)
        for recipe, group in groupby(rows, key=lambda row: row.recipe)
    }
    drawn = [Line(points, _RECIPES[recipe][1], has_dots=True) for recipe, points in curves.items()]
    heading = f'<text class="value" x="{frame.left:g}" y="12">{escape(name)}</text>'
    return heading + lines(name, drawn, x, y, frame, says=name).inside + _names(curves, x, y)


def _names(curves: dict[str, list[tuple[float, float]]], x: AxisScale, y: AxisScale) -> str:
    """The name of each recipe at the end of its line, moved down where two would touch."""
    drawn = []
    lowest = 0.0
    for recipe, points in sorted(curves.items(), key=lambda curve: -curve[1][-1][1]):
        name, colour = _RECIPES[recipe]
        bits, kl = points[-1]
        lowest = max(lowest + _LINE, y.place(kl) + 4)
        drawn.append(
            f'<g class="{colour}"><text class="value" style="fill:currentColor" '
            f'x="{x.place(bits) + 8:.1f}" y="{lowest:.1f}">{escape(name)}</text></g>'
        )
    return "".join(drawn)


def main() -> None:
    write_picture(drawing(read(PAGE.read_text(encoding="utf-8"))), PICTURE)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()

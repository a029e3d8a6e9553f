"""Sections of a report on the model: use of experts, co-activation, stand-ins, quantisation loss,
splits."""

from collections.abc import Sequence

from moectl.report import queries
from moectl.report.charts import figure, legend
from moectl.report.markup import Column, Section, data, nbytes, percent, short, table, times, whole
from moectl.report.reading import Record, ReportSource, grouped
from moectl.show.charts import Bar, bars, heatmap

_MOST_LAYERS = 3
_PAIRS = (
    Column("layer", "layer", whole),
    Column("i", "i", whole),
    Column("j", "j", whole),
    Column("tokens", "tokens", whole, "tokens that selected both"),
    Column("q[j|i]", "q", short, "share of i's pairs that are with j"),
)
_STANDINS = (
    Column("layer", "layer", whole),
    Column(
        "median of the best",
        "median_share",
        short,
        "loss of the best stand-in over that of leaving out",
    ),
    Column("with one better than none", "better", whole),
    Column("experts", "experts", whole),
)
_LOSS = (
    Column("bits", "bits", short),
    Column("mean error", "mean", short, "relative, of experts' outputs"),
    Column("worst expert", "worst", short),
    Column("all experts", "total", nbytes),
)
_SPLITS = (
    Column("layer", "layer", whole),
    Column("budget", "budget", short, "in experts"),
    Column("cached experts", "cache_size", whole),
    Column("theta", "theta", short, "share of a cached expert that is in the fast tier"),
    Column(
        "share of the stall",
        "stall_share",
        percent,
        "expected wait of this layer, of that of all layers",
    ),
)


def model_sections(source: ReportSource) -> list[Section]:
    return [_use(source), _together(source), _standins(source), _loss(source), _splits(source)]


def _use(source: ReportSource) -> Section:
    run = source.newest("activations")
    if run is None:
        return _missing("use", "Use of experts", "moectl profile")
    asked = queries.filled(queries.USE, run=run)
    rows = source.rows(asked)
    top = max(row["times_even"] for row in rows)
    chart = figure(
        heatmap(
            "Tokens of each expert, in times of even use",
            _matrix(rows, "layer", "expert", "times_even"),
            top=top,
            row="layer",
            column="expert",
            says="How often each expert of each layer was selected",
        )
    )
    return Section("use", "Use of experts", f"{chart}{legend(data(top, times))}", (asked,))


def _together(source: ReportSource) -> Section:
    title = "Experts selected together"
    run = source.newest("coactivations")
    if run is None:
        return _missing("together", title, "moectl profile")
    asked = queries.filled(queries.TOGETHER, run=run, layers=_some_layers(source))
    pairs = queries.filled(queries.PAIRS, run=run)
    drawn = _squares(source.rows(asked), "q", "share q of i's pairs that are with j")
    return Section(
        "together",
        title,
        f"{drawn}{table(source.rows(pairs), _PAIRS, label='Strongest pairs')}",
        (asked, pairs),
    )


def _standins(source: ReportSource) -> Section:
    title = "Stand-ins"
    run = source.newest("similarity")
    if run is None:
        return _missing("standins", title, "moectl profile")
    asked = queries.filled(queries.STANDINS, run=run, layers=_some_layers(source))
    best = queries.filled(queries.BEST_STANDINS, run=run)
    note = (
        "<p>What a layer's output loses when j serves in i's place, over what it loses when i is "
        "left out: below 1 a stand-in is better than none. Shades end at 2.</p>"
    )
    drawn = _squares(source.rows(asked), "share", "loss over that of leaving i out", limit=2.0)
    lines = table(source.rows(best), _STANDINS, label="Best stand-ins by layer")
    return Section("standins", title, f"{note}{drawn}{lines}", (asked, best))


def _loss(source: ReportSource) -> Section:
    title = "What few bits cost"
    run = source.newest("quant_loss")
    if run is None:
        return _missing("loss", title, "moectl quantize")
    asked = queries.filled(queries.LOSS, run=run)
    means = queries.filled(queries.LOSS_MEANS, run=run)
    rows = source.rows(asked)
    drawn = []
    for (bits,), group in grouped(rows, "bits"):
        top = max(row["relative"] for row in group)
        chart = figure(
            heatmap(
                f"{bits:g} bits: relative error of experts' outputs",
                _matrix(group, "layer", "expert", "relative"),
                top=top,
                row="layer",
                column="expert",
                says=f"Relative error of each expert at {bits:g} bits",
            )
        )
        drawn.append(f"<div>{chart}{legend(data(top))}</div>")
    lines = table(source.rows(means), _LOSS, label="Error and size by bits")
    return Section(
        "loss", title, f'<div class="charts">{"".join(drawn)}</div>{lines}', (asked, means)
    )


def _splits(source: ReportSource) -> Section:
    title = "Split experts"
    run = source.newest("splits")
    if run is None:
        return _missing("splits", title, "moectl split --machine NAME")
    asked = queries.filled(queries.SPLITS, run=run)
    rows = source.rows(asked)
    chart = figure(
        bars(
            (
                "Experts of each layer in the fast tier: whole ones' worth, and what is cut off "
                "those that are cached"
            ),
            [
                Bar(
                    f"layer {row['layer']}",
                    (row["budget"], max(row["cache_size"] - row["budget"], 0)),
                    f"{short(row['budget'])} of {row['cache_size']}, theta {short(row['theta'])}",
                    (row["budget"], row["cache_size"], row["theta"]),
                )
                for row in rows
            ],
            top=max(max(row["budget"], row["cache_size"]) for row in rows),
            says="Budget and cached experts of each layer",
        )
    )
    key = (
        '<p class="quiet"><i class="key p0"></i>resident <i class="key p1"></i>cut off, '
        "prefetched</p>"
    )
    return Section(
        "splits", title, f"{chart}{key}{table(rows, _SPLITS, label='Splits by layer')}", (asked,)
    )


def _squares(
    rows: Sequence[Record], value: str, meaning: str, *, limit: float | None = None
) -> str:
    """A matrix of experts by experts for each layer, all on one scale."""
    known = [row[value] for row in rows if row[value] is not None]
    top = max(known, default=1.0)
    drawn = "".join(
        figure(
            heatmap(
                f"layer {layer}",
                _matrix(group, "i", "j", value),
                top=min(top, limit or top),
                row="i",
                column="j",
                says=f"{meaning}, layer {layer}",
            )
        )
        for (layer,), group in grouped(rows, "layer")
    )
    most = data(top) if limit is None or limit >= top else f"{limit:g} or more"
    return f'<div class="charts small">{drawn}</div>{legend(most)}'


def _matrix(rows: Sequence[Record], down: str, across: str, value: str) -> list[list[float | None]]:
    """Rows as a matrix; cells without a row are None."""
    size = max(row[down] for row in rows) + 1, max(row[across] for row in rows) + 1
    cells: list[list[float | None]] = [[None] * size[1] for _ in range(size[0])]
    for row in rows:
        cells[row[down]][row[across]] = row[value]
    return cells


def _some_layers(source: ReportSource) -> list[int]:
    """A few layers, evenly spaced from the first to the last."""
    [model] = source.rows(queries.filled(queries.MODELS, model=source.model_id))
    last = model["num_layers"] - 1
    count = min(_MOST_LAYERS, model["num_layers"])
    return sorted({round(number * last / max(count - 1, 1)) for number in range(count)})


def _missing(key: str, title: str, command: str) -> Section:
    return Section(key, title, missing=f"Not in this store yet: <code>{command}</code> makes it.")

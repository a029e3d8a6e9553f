"""The tables of a bench: settings that ran, what other tools measured, and settings that could not
run."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from moectl.bench.ledger import PEER, BenchRow
from moectl.bench.other_tools import IMPORTED
from moectl.bench.request import FULL, PLAIN
from moectl.bench.table import ADDED, Benched
from moectl.show.losses import loss_words
from moectl.show.render import NumBytes, Sheet

Column = tuple[str, Callable[[BenchRow], object]]


def sheets(benched: Benched) -> list[Sheet]:
    """A table of the settings that ran, one of imported rows, and one of settings that could not
    run, if any."""
    rows = benched.arranged()
    ran = [row for row in rows if not row.why and row.mode != IMPORTED]
    imported = [row for row in rows if not row.why and row.mode == IMPORTED]
    refused = [row for row in rows if row.why]
    found = [_ran(benched, ran)]
    if imported:
        found.append(_sheet("Other tools, on another text and machine", _IMPORTED, imported))
    if refused:
        found.append(Sheet("Not run", ("preset", "budget", "why"), _reasons(refused)))
    return found


def _ran(benched: Benched, rows: Sequence[BenchRow]) -> Sheet:
    """Rows by budget and link, exact ones first; a column that says the same in every row, or
    nothing, is left out."""
    ordered = [
        row
        for _, group in groupby(rows, key=lambda row: (row.budget, row.link))
        for row in sorted(group, key=lambda row: not row.is_exact)
    ]
    times = _absolute() if benched.grounds.is_absolute else _ratios(benched)
    evaluated = dict.fromkeys((score.task, score.metric) for row in rows for score in row.tasks)
    columns: list[Column] = [
        ("budget", lambda row: row.budget),
        ("link", lambda row: row.link),
        ("preset", lambda row: _name(benched, row)),
        times[0],
        ("loss", _loss) if any(row.kl is not None for row in rows) else ("output", _output),
        ("best", lambda row: row.best),
        *times[1:],
        *_COUNTED,
        *((" ".join(one), lambda row, one=one: _score(row, one)) for one in evaluated),
    ]
    told = [column for column in columns if _tells(column, ordered)]
    added = [ADDED] * any(map(benched.is_added, rows))
    note = ". ".join((benched.grounds.says, benched.conditions, *added, *benched.notes))
    return _sheet("Bench", told, ordered, note)


def _absolute() -> list[Column]:
    return [
        ("ms a token", lambda row: _spread(row.tpot_ms, row.tpot_quartiles)),
        ("ms to first token", lambda row: _spread(row.ttft_ms, row.ttft_quartiles)),
        ("tokens/s", lambda row: row.tokens_per_s),
        ("waiting ms", lambda row: row.exposed_ms),
    ]


def _ratios(benched: Benched) -> list[Column]:
    """Return the columns of ratios: times over the times of `full`, and the time spent waiting for
    the link over the waiting time of `on-demand`."""

    def to_full(
        row: BenchRow, name: str, quartiles: tuple[float, float] | None
    ) -> str | float | None:
        ratio = benched.to(FULL, row, name)
        own = getattr(row, name)
        return ratio and _spread(
            ratio, quartiles and tuple(value * ratio / own for value in quartiles)
        )

    return [
        ("time, full = 1", lambda row: to_full(row, "tpot_ms", row.tpot_quartiles)),
        ("first token, full = 1", lambda row: to_full(row, "ttft_ms", row.ttft_quartiles)),
        ("waiting, on-demand = 1", lambda row: _short(benched.to(PLAIN, row, "exposed_ms"))),
    ]


_COUNTED: list[Column] = [
    ("drafted, undrafted = 1", lambda row: _spread(row.drafted_ratio, row.drafted_quartiles)),
    ("accepted", lambda row: _short(row.acceptance)),
    ("tokens a pass", lambda row: _short(row.tokens_per_pass)),
    ("hit rate", lambda row: row.hit_rate),
    ("moved", lambda row: _bytes(row.demand_bytes, row.prefetch_bytes)),
    ("wasted", lambda row: _bytes(row.wasted_bytes)),
    ("fast tier", lambda row: _bytes(row.peak_fast_bytes)),
    ("perplexity ratio", lambda row: _quality(row.perplexity_ratio)),
    ("KL", lambda row: _quality(row.kl)),
    ("top-1", lambda row: _quality(row.top1_agreement)),
]
_IMPORTED: list[Column] = [
    ("result", lambda row: f"{row.preset}, {row.mode}"),
    ("ms to first token", lambda row: _spread(row.ttft_ms, row.ttft_quartiles)),
    ("ms a token", lambda row: _spread(row.tpot_ms, row.tpot_quartiles)),
    ("tokens/s", lambda row: row.tokens_per_s),
]


def _sheet(
    title: str, columns: Sequence[Column], rows: Sequence[BenchRow], note: str = ""
) -> Sheet:
    return Sheet(
        title,
        tuple(name for name, _ in columns),
        [tuple(cell(row) for _, cell in columns) for row in rows],
        note,
    )


def _tells(column: Column, rows: Sequence[BenchRow]) -> bool:
    name, cell = column
    values = {cell(row) for row in rows if row.mode != PEER or name != "link"} - {None}
    return len(values) > 1 if name == "link" else bool(values)


def _name(benched: Benched, row: BenchRow) -> str:
    return (
        f"{row.preset}, {PEER}" if row.mode == PEER else row.preset + " *" * benched.is_added(row)
    )


def _output(row: BenchRow) -> str | None:
    return {True: "exact", False: "altered", None: None}[row.is_exact]


def _loss(row: BenchRow) -> str | None:
    """Perplexity lost, where the output is not that of the full model."""
    return (
        _output(row) if row.loss is None or row.is_exact else loss_words(row.loss, row.loss_error)
    )


def _score(row: BenchRow, wanted: tuple[str, str]) -> str | None:
    score = next((one for one in row.tasks if (one.task, one.metric) == wanted), None)
    if score is None:
        return None
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" (+- {score.stderr:.4f})")


def _quality(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _bytes(*counts: int | None) -> NumBytes | None:
    return None if None in counts else NumBytes(sum(counts))


def _spread(median: float | None, quartiles: Sequence[float] | None) -> str | float | None:
    if median is None or quartiles is None:
        return _short(median)
    return f"{median:.2f} ({quartiles[0]:.2f} to {quartiles[1]:.2f})"


def _short(value: float | None) -> float | None:
    """Three digits: a ratio of times has no more."""
    return None if value is None else float(f"{value:.3g}")


def _reasons(refused: Iterable[BenchRow]) -> list[tuple[str, str, str]]:
    """One line for each preset and reason, with the budgets that it applies to."""
    budgets: dict[tuple[str, str], dict[str, None]] = {}
    for row in refused:
        budgets.setdefault((row.preset, row.why), {})[row.budget] = None
    return [(preset, ", ".join(refused_at), why) for (preset, why), refused_at in budgets.items()]

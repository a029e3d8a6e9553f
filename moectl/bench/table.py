"""A bench as a table: sorted by budget and time, with the best rows of each budget marked."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from artifacts.shape import FULL_BITS, Shape
from moectl.bench.ledger import PEER, BenchRow
from moectl.bench.other_tools import IMPORTED
from moectl.bench.request import ORACLE
from moectl.show.render import NumBytes, Sheet
from profilers.compare.quality import Quality
from profilers.compare.tasks import TaskScore
from runtime.control import sizes

_BOUNDS = ("full", ORACLE)  # bounds for comparison, which no budget allows to choose
_SAME_KL = 1e-6  # nats: rounding alone stays below


@dataclass(frozen=True, slots=True)
class Benched:
    """The rows of a bench and their conditions; `job` is its digest in the store."""

    rows: Sequence[BenchRow]
    shape: Shape
    conditions: str
    notes: tuple[str, ...]
    job: str

    @property
    def has_run(self) -> bool:
        """Whether any setting could be measured."""
        return any(not row.why for row in self.rows)

    def arranged(self) -> list[BenchRow]:
        """The rows by budget, link and time, with the best marked. Refused settings end their group; imported rows
        come last."""
        measured = [row for row in self.rows if row.mode != IMPORTED]
        groups = groupby(sorted(measured, key=self._place), key=self._place)
        ours = [row for _, group in groups for row in _marked(list(group))]
        return ours + [row for row in self.rows if row.mode == IMPORTED]

    def records(self) -> dict[str, object]:
        """The bench as JSON values."""
        rows = [asdict(row) for row in self.arranged()]
        return {"rows": rows, "conditions": self.conditions, "notes": list(self.notes)}

    def _place(self, row: BenchRow) -> tuple[int, int]:
        links = list(dict.fromkeys(one.link for one in self.rows))
        return sizes.budget_nbytes(row.budget, self.shape), links.index(row.link)


def sheets(benched: Benched) -> list[Sheet]:
    """A table of the settings that ran, and one of those that could not, if any."""
    rows = benched.arranged()
    ran, refused = [row for row in rows if not row.why], [row for row in rows if row.why]
    columns = ("budget", "link", "preset", "TTFT ms", "TPOT ms", "tokens/s", "hit rate", "moved", "wasted", "stall ms")
    evaluated = list(dict.fromkeys((score.task, score.metric) for row in ran for score in row.tasks))
    columns += ("fast tier", "perplexity ratio", "KL", "top-1", *map(" ".join, evaluated), "best")
    table = Sheet(
        "Bench", columns, [_line(row, evaluated) for row in ran], ". ".join((benched.conditions, *benched.notes))
    )
    if not refused:
        return [table]
    return [table, Sheet("Not run", ("preset", "budget", "why"), _reasons(refused))]


def _marked(group: list[BenchRow]) -> list[BenchRow]:
    """The rows of one budget over one link by time, with the fastest and the fastest lossless one marked."""
    ordered = sorted(group, key=lambda row: (row.tpot_ms is None, row.tpot_ms or 0.0))
    chosen = [row for row in ordered if row.tpot_ms is not None and row.preset not in _BOUNDS and row.mode != PEER]
    fastest, exact = chosen[:1], [row for row in chosen if _is_exact(row)][:1]
    return [replace(row, best=_best(row in fastest, row in exact)) for row in ordered]


def _best(is_fastest: bool, is_exact: bool) -> str:
    return "fastest, lossless" if is_fastest and is_exact else "fastest" if is_fastest else "lossless" * is_exact


def _is_exact(row: BenchRow) -> bool:
    """Whether the measured output equals that of the full model."""
    return row.kl is not None and row.kl < _SAME_KL and row.top1_agreement == 1


def _line(row: BenchRow, evaluated: Sequence[tuple[str, str]]) -> tuple:
    scores = {(score.task, score.metric): score for score in row.tasks}
    quality = (row.perplexity_ratio, row.kl, row.top1_agreement)
    return (
        row.budget,
        row.link,
        f"{row.preset}, {row.mode}" if row.mode in (IMPORTED, PEER) else row.preset,
        _time(row.ttft_ms, row.ttft_quartiles),
        _time(row.tpot_ms, row.tpot_quartiles),
        row.tokens_per_s,
        row.hit_rate,
        _bytes(row.demand_bytes, row.prefetch_bytes),
        _bytes(row.wasted_bytes),
        row.exposed_ms,
        _bytes(row.peak_fast_bytes),
        *(None if value is None else f"{value:.4f}" for value in quality),
        *(_score(scores.get(one)) for one in evaluated),
        row.best,
    )


def _score(score: TaskScore | None) -> str | None:
    if score is None:
        return None
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" (+- {score.stderr:.4f})")


def _bytes(*counts: int | None) -> NumBytes | None:
    return None if None in counts else NumBytes(sum(counts))


def _time(median: float | None, quartiles: tuple[float, float] | None) -> str | float | None:
    if median is None or quartiles is None:
        return median
    return f"{median:.2f} ({quartiles[0]:.2f} to {quartiles[1]:.2f})"


def _reasons(refused: Iterable[BenchRow]) -> list[tuple[str, str, str]]:
    """One line for each preset and reason, with the budgets that it applies to."""
    budgets: dict[tuple[str, str], dict[str, None]] = {}
    for row in refused:
        budgets.setdefault((row.preset, row.why), {})[row.budget] = None
    return [(preset, ", ".join(refused_at), why) for (preset, why), refused_at in budgets.items()]


def loss_of_base(quality: Quality, base: int, dense: int | None = None) -> str:
    """One line on the loss of the base itself, or of dense weights of few bits, to which the losses of the rows add."""
    experts = f"every expert is a replica of {base} bits, budgets are of these bytes" * (base != FULL_BITS)
    others = "" if dense is None else f"linear layers besides experts and routers have {dense} bits"
    return (
        f"the base: {' and '.join(filter(None, (experts, others)))}; quality is against it, and it "
        f"loses {100 * (quality.perplexity_ratio - 1):.2f} % of perplexity to the checkpoint itself (KL "
        f"{quality.kl:.4f}, top-1 {quality.top1_agreement:.4f})"
    )

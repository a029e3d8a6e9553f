"""A bench as a table: by budget, exact rows first, with the best rows of each budget marked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from artifacts.modelshapes.kv_cache import AUTO
from artifacts.shape import FULL_BITS, Shape
from moectl.bench.ledger import PEER, BenchRow
from moectl.bench.other_tools import IMPORTED
from moectl.bench.request import FULL, ORACLE
from moectl.show.grounds import Grounds
from moectl.show.losses import loss_words
from profilers.compare.quality import Quality
from runtime.control import sizes

_BOUNDS = (FULL, ORACLE)  # bounds for comparison, which no budget allows to choose
ADDED = "* not asked for: it stands there for comparison"


@dataclass(frozen=True, slots=True)
class Benched:
    """The rows of a bench and their conditions; `grounds` are those of its times, `asked` the names
    of presets and programs that the request lists, `job` is its digest in the store."""

    rows: Sequence[BenchRow]
    shape: Shape
    grounds: Grounds
    asked: Sequence[str]
    conditions: str
    notes: tuple[str, ...]
    job: str

    @property
    def has_run(self) -> bool:
        """True if any setting could be measured."""
        return any(not row.why for row in self.rows)

    def arranged(self) -> list[BenchRow]:
        """The rows by budget, link and time, with the best marked. Refused settings end their
        group; imported rows come last."""
        measured = [row for row in self.rows if row.mode != IMPORTED]
        groups = groupby(sorted(measured, key=self._place), key=self._place)
        ours = [row for _, group in groups for row in _marked(list(group))]
        return ours + [row for row in self.rows if row.mode == IMPORTED]

    def records(self) -> dict[str, object]:
        """The bench as JSON values."""
        rows = [
            asdict(row)
            | {
                "is_exact": row.is_exact,
                "loss": row.loss,
                "is_distinguishable": row.is_distinguishable,
            }
            | {"is_added": self.is_added(row), "times_full": self.to(FULL, row)}
            for row in self.arranged()
        ]
        about = {
            "conditions": self.conditions,
            "notes": list(self.notes),
            "grounds": self.grounds.says,
        }
        return {"rows": rows, **about, "is_absolute": self.grounds.is_absolute}

    def is_added(self, row: BenchRow) -> bool:
        """Return whether the bench added the row: its preset was not asked for."""
        return row.mode != IMPORTED and row.preset not in self.asked

    def to(self, preset: str, row: BenchRow, name: str = "tpot_ms") -> float | None:
        """Return a time over the same time of `preset`, at the same budget and link if `preset` has
        that."""
        own = getattr(row, name)
        others = [one for one in self.rows if one.preset == preset and getattr(one, name)]
        if own is None or not others or row.mode == IMPORTED:
            return None
        near = sorted(others, key=lambda one: (one.link != row.link, one.budget != row.budget))
        return own / getattr(near[0], name)

    def _place(self, row: BenchRow) -> tuple[int, int]:
        links = list(dict.fromkeys(one.link for one in self.rows))
        return sizes.budget_nbytes(row.budget, self.shape), links.index(row.link)


def _marked(group: list[BenchRow]) -> list[BenchRow]:
    """The rows of one budget over one link by time, with the fastest and the fastest lossless one
    marked."""
    ordered = sorted(group, key=lambda row: (row.tpot_ms is None, row.tpot_ms or 0.0))
    chosen = [
        row
        for row in ordered
        if row.tpot_ms is not None and row.preset not in _BOUNDS and row.mode != PEER
    ]
    fastest = chosen[:1]
    exact = [row for row in chosen if row.is_exact][:1]
    return [replace(row, best=_best(row in fastest, row in exact)) for row in ordered]


def _best(is_fastest: bool, is_exact: bool) -> str:
    return (
        "fastest, lossless"
        if is_fastest and is_exact
        else "fastest"
        if is_fastest
        else "lossless" * is_exact
    )


def loss_of_base(
    quality: Quality,
    base: int,
    dense: int | None = None,
    *,
    kv_cache_dtype: str = AUTO,
    activations: int | None = None,
) -> str:
    """One line on the loss of the base itself, or of dense weights, keys and values or activations
    of few bits, to which the losses of the rows add."""
    experts = f"every expert is a replica of {base} bits, budgets are of these bytes" * (
        base != FULL_BITS
    )
    lost = loss_words(quality.perplexity_ratio - 1, quality.loss_error)
    others = "" if dense is None else f"linear layers besides experts and routers have {dense} bits"
    kept = f"keys and values are in {kv_cache_dtype}" * (kv_cache_dtype != AUTO)
    rounded = f"activations have {activations} bits" * (activations is not None)
    own = " and ".join(filter(None, (experts, others, kept, rounded)))
    return (
        f"the base: {own}; quality is against it, and it loses of perplexity to the checkpoint "
        f"itself: {lost} (KL {quality.kl:.4f}, top-1 {quality.top1_agreement:.4f})"
    )

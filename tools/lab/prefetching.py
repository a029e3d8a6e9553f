"""`moectl inspect prefetch`: how well each prefetch policy predicts, how far ahead, and with what
effect."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from artifacts.errors import BadUsage
from artifacts.routing.predictors import RECORDED
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import Trace
from moectl.shared.terminal.progress import progress_bar
from moectl.shared.trace_source import OpenedTrace, TraceSource, open_source
from moectl.show.render import NumBytes, Sheet, show_json, show_sheet
from runtime.control import sizes
from runtime.policies import parse
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from tools.lab.price_prefetch import PrefetchForesight, PrefetchTier, foresight

CONTROLS = ("random", "popular", "oracle")
_COLUMNS = (
    "predictor", "layers ahead", "recall", "precision", "in time", "late", "wasted share",
    "prefetched", "wasted",
    "on demand", "misses", "hit rate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """The fast tier that receives the prefetches, and the largest distance in layers."""

    distance: int = 3
    budget: str = "25%"
    eviction: str = "least_stale"
    window: str | None = None  # bytes that may be prefetched a step; None: two experts

    def __post_init__(self) -> None:
        parse("eviction", self.eviction)


@dataclass(frozen=True, slots=True)
class PrefetchRow:
    """One predictor at one distance."""

    predictor: str
    distance: int
    priced: PrefetchForesight


@dataclass(frozen=True, slots=True)
class MeasuredPrefetch:
    """All rows, the controls last, and the conditions of the measurement."""

    rows: list[PrefetchRow]
    conditions: str
    left_out: list[str]


def prefetching(source: TraceSource, request: PrefetchRequest) -> MeasuredPrefetch:
    """Replay the source's trace with every prefetch policy that its data allows.

    Raises BadUsage, BadInput or Incompatible.
    """
    opened = open_source(replace(source, with_maps=True))
    shape = opened.model.shape
    tier = PrefetchTier(
        num_slots=sizes.num_slots(request.budget, shape, per_layer=False),
        scope=Scope.GLOBAL,
        eviction=request.eviction,
        window=sizes.nbytes(request.window) if request.window else 2 * shape.expert_nbytes,
    )
    artefacts = _artefacts(opened, request)
    asked = [
        (name, distance, text)
        for name in (*_predictors(opened.trace, artefacts), *CONTROLS)
        for distance in range(
            1, min(request.distance, _reach(name, opened.trace), shape.num_layers) + 1
        )
        for text in [_text(name, distance, opened.trace)]
    ]
    rows = []
    with progress_bar("replaying", unit="ways") as advance:
        for number, (name, distance, text) in enumerate(asked):
            advance(number, len(asked))
            rows.append(
                PrefetchRow(name, distance, foresight(opened.trace, shape, text, tier, artefacts))
            )
    conditions = (
        f"{opened.name}: {len(opened.trace) // opened.trace.num_layers:,} tokens; "
        f"{tier.num_slots} of {shape.num_keys} experts, {tier.scope}, {tier.eviction}; "
        f"{tier.window / shape.expert_nbytes:.3g} experts prefetched a step; "
        f"{', '.join(CONTROLS)}: controls"
    )
    return MeasuredPrefetch(rows, conditions, list(_left_out(opened.trace, artefacts)))


def show(measured: MeasuredPrefetch, *, as_json: bool) -> None:
    sheet = table(measured)
    if as_json:
        show_json(
            {
                "conditions": measured.conditions,
                "rows": sheet.records(),
                "left_out": measured.left_out,
            }
        )
        return
    show_sheet(sheet)
    for line in measured.left_out:
        print(f"left out: {line}")


def table(measured: MeasuredPrefetch) -> Sheet:
    rows = []
    for row in measured.rows:
        priced = row.priced
        wasted = priced.wasted_bytes / max(1, priced.prefetch_bytes)
        amounts = (
            NumBytes(priced.prefetch_bytes),
            NumBytes(priced.wasted_bytes),
            NumBytes(priced.demand_bytes),
        )
        shares = (priced.recall, priced.precision, priced.in_time, priced.late, wasted)
        rows.append(
            (row.predictor, row.distance, *shares, *amounts, priced.misses, priced.hit_rate)
        )
    return Sheet("Prefetching", _COLUMNS, rows, measured.conditions)


def refuse_views(*, heatmap: bool, layer: int | None, model: str | None) -> None:
    """Raise BadUsage for views that a table of predictors does not have."""
    if heatmap or layer is not None:
        raise BadUsage(
            "inspect prefetch has no heatmap and no layers: leave out --heatmap and --layer"
        )
    if model is not None:
        raise BadUsage(f"inspect prefetch reads a trace, not a model: leave {model} out")


def _predictors(trace: Trace, artefacts: Artefacts) -> Iterator[str]:
    """Yield the prefetch policies that this trace and the store have the data for."""
    if trace.predicted is not None:
        yield "next_gate"
    if trace.learned is not None:
        yield "learned"
    if _has_maps(trace, artefacts):
        yield "map"
    yield from ("frequency", "affinity", "activation")
    if trace.predicted is not None:
        yield "blend"


def _left_out(trace: Trace, artefacts: Artefacts) -> Iterator[str]:
    if trace.predicted is None:
        yield (
            "next_gate and blend, for the trace holds no predictions: `moectl profile --trace` "
            "keeps some"
        )
    if trace.learned is None:
        yield (
            "learned, for the trace does not hold what predictors say: `moectl build-predictor`, "
            "then profile --trace"
        )
    if not _has_maps(trace, artefacts):
        yield (
            "map, which needs maps in the store, and probabilities and embeddings in the trace: "
            "`moectl build-maps`"
        )


def _has_maps(trace: Trace, artefacts: Artefacts) -> bool:
    return (
        artefacts.maps is not None
        and trace.probabilities is not None
        and trace.iteration is not None
    )


def _reach(name: str, trace: Trace) -> int:
    """Return how many layers ahead the trace has the data for."""
    reach = {"next_gate": trace.predicted, "blend": trace.predicted, "learned": trace.learned}
    if name not in reach:
        return trace.num_layers
    if name == "blend" and trace.learned is not None:
        return min(trace.predicted.shape[1], trace.learned.shape[1])
    return reach[name].shape[1]


def _text(name: str, distance: int, trace: Trace) -> str:
    without = ",learned=no" if name == "blend" and trace.learned is None else ""
    return f"{name}:distance={distance}{without}"


def _artefacts(opened: OpenedTrace, request: PrefetchRequest) -> Artefacts:
    return replace(
        opened.artefacts,
        next_use=NextUse.of(opened.trace, opened.model.shape),
        predictors=RECORDED,
        learns_maps=False,
    )

"""`moectl fit-trace`: fit the dials of a synthetic trace to a given trace or to hit rates."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from artifacts.errors import BadUsage
from artifacts.modelshapes.known import ModelShape, model_shape
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import PREFILL, Trace
from moectl.shared.terminal.progress import progress_bar
from moectl.shared.terminal.resuming import resumable
from moectl.shared.trace_source import TraceSource, open_source
from moectl.show.render import Sheet, show_json, show_sheet
from tools.lab.fit_synthetic import (
    fit_hit_rates,
    fit_statistics,
    hit_rates,
    misfit,
    parse_hit_rates,
)
from tools.lab.trace_statistics import measure

_DIALS = {
    "concentration": "skew",
    "reuse": "locality",
    "similarity": "similarity",
    "prediction": "predictability",
    "near_prediction": "grading",
}
# Published hit rates are of decoding alone. The dial `similarity` says how much requests differ.
_FOR_HIT_RATES = Dials(tokens=1200, requests=6, prompt=0)


_USUAL = 40  # traces that a fit usually tries; the progress bar expects so many


@dataclass(frozen=True, slots=True)
class FittedTrace:
    """The fitted dials; `sheet` has the wanted statistics beside the statistics that the dials
    give."""

    dials: Dials
    sheet: Sheet


@resumable()
def fit_trace(source: TraceSource, hits: Sequence[str], *, seed: int) -> FittedTrace:
    """Fit to hit rates if any are given, else to the trace of the source."""
    if hits and (source.trace or source.run):
        raise BadUsage("give either a trace to be like or --hits, not both")
    if hits:
        return _to_hit_rates(hits, model_shape(source.model or "olmoe-1b-7b"), seed)
    opened = open_source(source)
    return _to_statistics(opened.trace, opened.model, seed)


def show(fitted: FittedTrace, *, as_json: bool) -> None:
    """Print the dials and how close they come, or one JSON object."""
    if as_json:
        show_json(
            {
                "synthetic": str(fitted.dials),
                "dials": asdict(fitted.dials),
                "rows": fitted.sheet.records(),
            }
        )
        return
    show_sheet(fitted.sheet)
    print(f'--synthetic "{fitted.dials}"')


def _to_statistics(trace: Trace, model: ModelShape, seed: int) -> FittedTrace:
    target = measure(trace, model.shape.num_experts)
    dials = fit_statistics(target, model.shape, _of_the_size_of(trace, seed))
    reached = measure(generate(dials, model.shape), model.shape.num_experts)
    rows = [
        (dial, getattr(dials, dial), name, getattr(target, name), getattr(reached, name))
        for name, dial in _DIALS.items()
    ]
    note = "a statistic that no value of its dial reaches leaves the dial at an end of its range"
    return FittedTrace(
        dials,
        Sheet("Fitted to a trace", ("dial", "value", "statistic", "wanted", "reached"), rows, note),
    )


def _of_the_size_of(trace: Trace, seed: int) -> Dials:
    """Return dials for as many requests and tokens as the trace has, and prompts of its mean
    length."""
    first = trace.take((trace.layer == 0).nonzero()[0])
    requests = len(set(first.request.tolist()))
    prompt = int((first.phase == PREFILL).sum()) // requests
    tokens = max(len(first), requests * (prompt + 1))
    return Dials(tokens=tokens, requests=requests, prompt=prompt, seed=seed)


def _to_hit_rates(hits: Sequence[str], model: ModelShape, seed: int) -> FittedTrace:
    wanted = [parse_hit_rates(text) for text in hits]
    with progress_bar("fitting", unit="traces") as advance:
        start = replace(_FOR_HIT_RATES, seed=seed)
        dials = fit_hit_rates(
            wanted, model, start, progress=lambda tried: advance(tried, max(tried, _USUAL))
        )
    reached = hit_rates(dials, model, wanted, num_layers=2)
    rows = [
        (theirs.eviction, num_held, rate, mine.rates[num_held], mine.rates[num_held] - rate)
        for mine, theirs in zip(reached, wanted, strict=True)
        for num_held, rate in theirs.rates.items()
    ]
    of_model = f"{model.name}'s {model.shape.num_experts} experts"
    note = f"root mean squared difference {misfit(reached, wanted):.3f}, on {of_model}"
    columns = ("policy", "experts held", "wanted", "reached", "difference")
    return FittedTrace(dials, Sheet("Fitted to hit rates", columns, rows, note))

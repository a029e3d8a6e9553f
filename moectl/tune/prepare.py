"""What a search for policies begins with: text, a trace, what the store knows, how errors become losses, how much."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from artifacts.errors import Problem
from artifacts.hardware.profile import HardwareProfile
from artifacts.routing.similarity import Similarity
from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.store import Store
from artifacts.traces.trace import Trace, cut_by_request, is_one_by_one
from moectl.bench.simulated import record_trace
from moectl.shared.text import read_text
from moectl.shared.trace_source import OpenedTrace, TraceSource, open_source
from moectl.tune.request import Request
from profilers.compare.verify_search import Verifier
from profilers.hardware.live_costs import LiveCosts
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.search.halving import ETA
from runtime.search.results import LEAST_PASSES, MOST_PASSES, Plan, Scale
from runtime.search.search import Search
from runtime.search.space import Combination
from runtime.session.artefacts import load_artefacts, load_similarity

RECORDED = 2  # times the tokens that are verified on, in a trace that is recorded first
_SEARCHING = 0.5  # of the minutes; the rest is for live runs
_FEW, _MANY = 9, 2000  # candidates of a space
_CLIMBING = 48  # neighbours of the best that are looked at, at least
_TELLING = (  # of few bits, the second where not every expert's replica fits; of stand-ins
    (Combination(miss="shadow", residency="shadow:slots=no"), Combination(miss="fetch_lowest")),
    (Combination(miss="substitute"),),
)
_CHECKED = 0.25  # of the requests, kept aside for the check where no other text is given


def known_of(path: Path, opened: MoeModel) -> tuple[Artefacts, Similarity | None, HardwareProfile | None]:
    if not path.exists():
        return Artefacts(), None, None
    model_id = opened.fingerprint[:16]
    with Store.open(path, read_only=True) as store:
        artefacts = load_artefacts(store, model_id, opened.shape)
        return artefacts, load_similarity(store, model_id, opened.shape), stored_profile(store, model_id)


def trace_for(name: str, opened: MoeModel, request: Request, path: Path) -> OpenedTrace:
    """The store's newest of this model that decodes one request at a time and foresees; else one recorded now."""
    if path.exists():
        with Store.open(path, read_only=True) as store:
            runs = [run for run in reversed(store.runs()) if "traces" in run.contents]
        model_id = opened.fingerprint[:16]
        for run in (run for run in runs if run.info.model_id == model_id):
            found = open_source(TraceSource(run=run.run_id, store=path))
            if found.trace.predicted is not None and is_one_by_one(found.trace):
                return found
    return _recorded(name, opened, request, path, request.data)


def _recorded(name: str, opened: MoeModel, request: Request, path: Path, data: str) -> OpenedTrace:
    num_tokens = RECORDED * request.tokens
    text = read_text(opened, data, length=request.length, num_tokens=num_tokens, seed=request.seed)
    run = record_trace(name, opened, text, path, data=data, seed=request.seed)
    return open_source(TraceSource(run=run, store=path))


def parts_of(name: str, opened: MoeModel, traced: OpenedTrace, request: Request) -> tuple[Trace, Trace, str]:
    """The trace to tune on, the one to check on, and how to speak of that."""
    if request.check_data is None:
        return *cut_by_request(traced.trace, _CHECKED), "the last quarter of the requests"
    with TemporaryDirectory() as aside:  # or the next search would take it for what to tune on
        other = _recorded(name, opened, request, Path(aside) / "check.duckdb", request.check_data)
    return traced.trace, other.trace, request.check_data


def search_on(
    traced: OpenedTrace, trace: Trace, pace: LiveCosts, similarity: Similarity | None, request: Request
) -> Search:
    return Search(
        trace,
        traced.model,
        pace.machine,
        artefacts=traced.artefacts,
        budget=request.budget,
        costs=pace.costs,
        window=pace.window,
        similarity=similarity,
    )


def scale_of(search: Search, verifier: Verifier) -> Scale:
    """Nats for a unit of squared error, each of the two kinds by the first of some candidates that runs, read live: its
    divergence, which few tokens tell better than their perplexity."""
    return Scale(*(_slope(search, verifier, part, candidates) for part, candidates in enumerate(_TELLING)))


def _slope(search: Search, verifier: Verifier, part: int, candidates: Sequence[Combination]) -> float | None:
    amount = min(search.num_passes, 4 * LEAST_PASSES)
    for one in candidates:
        try:
            if damage := search.replay(one, amount).damage[part]:
                return float(verifier.quality(one, briefly=True).kl / damage)
        except Problem:
            continue
    return None


def plan_for(search: Search, request: Request, *, num_workers: int) -> tuple[Plan, str]:
    """As many candidates as the time allows, by how fast a replay is and how many replay; or as many as are asked
    for."""
    passes = min(search.num_passes, MOST_PASSES)
    if request.candidates is not None:
        count, told = request.candidates, "as many as were asked for"
    else:
        pass_s = search.seconds_a_pass()
        amounts = Plan(0, passes, 0, request.seed, request.max_loss).rungs
        each_s = 2 * pass_s * amounts[0] * (len(amounts) + ETA)  # of both spaces; a round each, and a neighbour
        count = int(_SEARCHING * 60 * request.minutes * num_workers / each_s)
        count = max(_FEW, min(_MANY, count))
        told = f"as many as {request.minutes:g} minutes allow at {1e3 * pass_s:.2g} ms a pass"
    return Plan(count, passes, max(_CLIMBING, count), request.seed, request.max_loss), told

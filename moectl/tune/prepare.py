"""Prepares a search for policies: text, a trace, artefacts, the scale from errors to losses, and the search plan."""

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
from moectl.tune.request import TuneRequest
from profilers.compare.verify_search import Verifier
from profilers.hardware.live_costs import LiveCosts
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.search.halving import ETA
from runtime.search.results import LEAST_PASSES, MOST_PASSES, LossScale, SearchPlan
from runtime.search.search import Search
from runtime.search.space import Combination
from runtime.session.artefacts import load_artefacts, load_similarity

RECORDED = 2  # tokens of a trace recorded here, as a multiple of the tokens for verification
_SEARCHING = 0.5  # share of the minutes for replays; live runs take the rest
_FEW, _MANY = 9, 2000  # bounds on the candidates of a search space
_CLIMBING = 48  # least number of neighbours of the best that are replayed
_PROBES = (  # of the error by few bits (the second needs no room for all replicas) and by stand-ins
    (Combination(miss="shadow", residency="shadow:slots=no"), Combination(miss="fetch_lowest")),
    (Combination(miss="substitute"),),
)
_CHECKED = 0.25  # share of the requests held out for the check without other text


def known_of(path: Path, opened: MoeModel) -> tuple[Artefacts, Similarity | None, HardwareProfile | None]:
    if not path.exists():
        return Artefacts(), None, None
    model_id = opened.fingerprint[:16]
    with Store.open(path, read_only=True) as store:
        artefacts = load_artefacts(store, model_id, opened.shape)
        return artefacts, load_similarity(store, model_id, opened.shape), stored_profile(store, model_id)


def trace_for(name: str, opened: MoeModel, request: TuneRequest, path: Path) -> OpenedTrace:
    """The newest trace of this model in the store that has single-request decoding and predictions, else a new one."""
    if path.exists():
        with Store.open(path, read_only=True) as store:
            runs = [run for run in reversed(store.runs()) if "traces" in run.contents]
        model_id = opened.fingerprint[:16]
        for run in (run for run in runs if run.info.model_id == model_id):
            stored = open_source(TraceSource(run=run.run_id, store=path))
            if stored.trace.predicted is not None and is_one_by_one(stored.trace):
                return stored
    return _recorded(name, opened, request, path, request.data)


def _recorded(name: str, opened: MoeModel, request: TuneRequest, path: Path, data: str) -> OpenedTrace:
    num_tokens = RECORDED * request.tokens
    text = read_text(opened, data, length=request.length, num_tokens=num_tokens, seed=request.seed)
    run = record_trace(name, opened, text, path, data=data, seed=request.seed)
    return open_source(TraceSource(run=run, store=path))


def parts_of(name: str, opened: MoeModel, traced: OpenedTrace, request: TuneRequest) -> tuple[Trace, Trace, str]:
    """The trace to tune on, the trace to check on, and a description of the latter."""
    if request.check_data is None:
        return *cut_by_request(traced.trace, _CHECKED), "the last quarter of the requests"
    with TemporaryDirectory() as aside:  # so that the next search does not tune on it
        other = _recorded(name, opened, request, Path(aside) / "check.duckdb", request.check_data)
    return traced.trace, other.trace, request.check_data


def search_on(
    traced: OpenedTrace, trace: Trace, pace: LiveCosts, similarity: Similarity | None, request: TuneRequest
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


def scale_of(search: Search, verifier: Verifier) -> LossScale:
    """Nats for a unit of squared error by few bits and by stand-ins.

    Each is measured live on the first probe that runs, by KL divergence, which needs fewer tokens than perplexity.
    """
    return LossScale(*(_slope(search, verifier, part, candidates) for part, candidates in enumerate(_PROBES)))


def _slope(search: Search, verifier: Verifier, part: int, candidates: Sequence[Combination]) -> float | None:
    amount = min(search.num_passes, 4 * LEAST_PASSES)
    for one in candidates:
        try:
            if damage := search.replay(one, amount).damage[part]:
                return float(verifier.quality(one, briefly=True).kl / damage)
        except Problem:
            continue
    return None


def plan_for(search: Search, request: TuneRequest, *, num_workers: int) -> tuple[SearchPlan, str]:
    """The plan of a search and a note on its size: `request.candidates`, or as many as fit into the minutes.

    The time of a replay is measured; `num_workers` replay side by side.
    """
    passes = min(search.num_passes, MOST_PASSES)
    if request.candidates is not None:
        count, note = request.candidates, "as many as were asked for"
    else:
        pass_s = search.seconds_a_pass()
        amounts = SearchPlan(0, passes, 0, request.seed, request.max_loss).rungs
        each_s = 2 * pass_s * amounts[0] * (len(amounts) + ETA)  # for two spaces: a round each, and as many neighbours
        count = int(_SEARCHING * 60 * request.minutes * num_workers / each_s)
        count = max(_FEW, min(_MANY, count))
        note = f"as many as {request.minutes:g} minutes allow at {1e3 * pass_s:.2g} ms a pass"
    return SearchPlan(count, passes, max(_CLIMBING, count), request.seed, request.max_loss), note

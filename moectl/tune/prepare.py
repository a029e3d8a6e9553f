"""Prepares a search for policies: text, a trace, artefacts, the scale from errors to losses, and
the search plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from artifacts.errors import Problem
from artifacts.hardware.profile import HardwareProfile
from artifacts.routing.similarity import Similarity
from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.store import Store
from artifacts.traces.trace import Trace, cut_by_request, is_one_by_one
from moectl.bench.simulated import record_trace
from moectl.shared.terminal.progress import Phases
from moectl.shared.text import read_text
from moectl.shared.trace_source import OpenedTrace, TraceSource, open_source
from moectl.tune.request import TuneRequest
from moectl.tune.timing import NO_SCALE, Minutes
from profilers.compare.bench import BenchText
from profilers.compare.verify_search import Verifier
from profilers.hardware.live_costs import LiveCosts, live_costs
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.search.halving import ETA
from runtime.search.results import LEAST_PASSES, MOST_PASSES, LossScale, SearchPlan, SearchTime
from runtime.search.search import Search
from runtime.search.space import Combination
from runtime.session.artefacts import load_artefacts, load_similarity

RECORDED = 2  # tokens of a trace recorded here, as a multiple of the tokens for verification
_LEAST_SEQUENCES = 4  # of a trace: a quarter of them is held out
# bounds on the candidates of a search space
_FEW = 9
_MANY = 2000
_CLIMBING = 48  # least number of neighbours of the best that are replayed
_PROBES = (  # of the error by few bits (the second needs no room for all replicas) and by stand-ins
    (Combination(miss="shadow", residency="shadow:slots=no"), Combination(miss="fetch_lowest")),
    (Combination(miss="substitute"),),
)
_CHECKED = 0.25  # share of the requests held out for the check without other text


def known_of(
    path: Path, opened: MoeModel, *, base: int
) -> tuple[Artefacts, Similarity | None, HardwareProfile | None]:
    if not path.exists():
        return Artefacts(), None, None
    model_id = opened.fingerprint[:16]
    with Store.open(path, read_only=True) as store:
        artefacts = load_artefacts(store, model_id, opened.shape, base=base)
        return (
            artefacts,
            load_similarity(store, model_id, opened.shape),
            stored_profile(store, model_id),
        )


def trace_for(
    name: str,
    opened: MoeModel,
    request: TuneRequest,
    path: Path,
    minutes: Minutes,
    *,
    token_s: float,
) -> OpenedTrace:
    """Return the newest trace of this model in the store that has single-request decoding and
    predictions.

    Without one, record a trace; the store gets it if there was time for all of it.
    """
    if path.exists():
        with Store.open(path, read_only=True) as store:
            runs = store.runs(model_id=opened.fingerprint[:16], table="traces")
        for run in reversed(runs):
            stored = open_source(TraceSource(run=run.run_id, store=path))
            if stored.trace.predicted is not None and is_one_by_one(stored.trace):
                return stored
    text = _text(opened, request, request.data)
    part = minutes.cut(text, "the trace", token_s=token_s, least=_LEAST_SEQUENCES)
    if len(part.sequences) == len(text.sequences):
        return _recorded(name, opened, text, path, request.data, seed=request.seed)
    # so that a search with more time does not take it for a whole one
    with TemporaryDirectory() as aside:
        traced = _recorded(
            name, opened, part, Path(aside) / "part.duckdb", request.data, seed=request.seed
        )
    return replace(
        traced,
        name=f"{len(part.sequences)} sequences of {request.data}",
        artefacts=known_of(path, opened, base=request.base)[0],
    )


def _text(opened: MoeModel, request: TuneRequest, data: str) -> BenchText:
    num_tokens = RECORDED * request.tokens
    return read_text(opened, data, length=request.length, num_tokens=num_tokens, seed=request.seed)


def _recorded(
    name: str, opened: MoeModel, text: BenchText, path: Path, data: str, *, seed: int
) -> OpenedTrace:
    run = record_trace(name, opened, text, path, data=data, seed=seed)
    return open_source(TraceSource(run=run, store=path))


def parts_of(
    name: str,
    opened: MoeModel,
    traced: OpenedTrace,
    request: TuneRequest,
    minutes: Minutes,
    *,
    token_s: float,
) -> tuple[Trace, Trace, str]:
    """The trace to tune on, the trace to check on, and a description of the latter."""
    if request.check_data is None:
        return *cut_by_request(traced.trace, _CHECKED), "the last quarter of the requests"
    text = minutes.cut(
        _text(opened, request, request.check_data),
        "the trace to check on",
        token_s=token_s,
        least=2,
    )
    with TemporaryDirectory() as aside:  # so that the next search does not tune on it
        file = Path(aside) / "check.duckdb"
        other = _recorded(name, opened, text, file, request.check_data, seed=request.seed)
    return traced.trace, other.trace, request.check_data


def pace_of(
    opened: MoeModel,
    request: TuneRequest,
    artefacts: Artefacts,
    profile: HardwareProfile | None,
    folder: Path,
    minutes: Minutes,
) -> LiveCosts:
    """Return the costs of the model where it is to run. If time runs out, some widths and some
    policies' own times are left out."""
    wanted = {"scaled_to": request.scaled_to, "link": request.link, "experts": request.experts}
    is_late = minutes.phases.is_late
    pace = live_costs(
        opened, folder, **wanted, artefacts=artefacts, profile=profile, is_late=is_late
    )
    if not pace.is_profiled:
        minutes.lack(
            "the speed of few bits and the own time of policies where measuring had not come to "
            "them"
        )
    return pace


def search_on(
    traced: OpenedTrace,
    trace: Trace,
    pace: LiveCosts,
    similarity: Similarity | None,
    request: TuneRequest,
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
        clients=request.served,
    )


def scale_of(search: Search, verifier: Verifier, minutes: Minutes) -> LossScale:
    """Nats for a unit of squared error by few bits and by stand-ins.

    Each is measured live on the first probe that runs, by KL divergence, which needs fewer tokens
    than perplexity.
    """
    if minutes.lack(NO_SCALE):
        return LossScale()
    return LossScale(
        *(_slope(search, verifier, part, candidates) for part, candidates in enumerate(_PROBES))
    )


def _slope(
    search: Search, verifier: Verifier, part: int, candidates: Sequence[Combination]
) -> float | None:
    amount = min(search.num_passes, 4 * LEAST_PASSES)
    for one in candidates:
        try:
            if damage := search.replay(one, amount).damage[part]:
                return float(verifier.quality(one, briefly=True).kl / damage)
        except Problem:
            continue
    return None


def plan_for(
    search: Search, request: TuneRequest, minutes: Minutes, *, num_workers: int
) -> tuple[SearchPlan, SearchTime | None, str]:
    """The plan of a search, its time, and a note on its size: `request.candidates`, however long
    they take, or as many as the phase has time for.

    The time of a replay is measured; `num_workers` replay side by side. Where there is time for
    few, they replay less.
    """
    passes = min(search.num_passes, MOST_PASSES)
    if request.candidates is not None:
        count = request.candidates
        note = "as many as were asked for"
        time = None
    else:
        pass_s = search.seconds_a_pass()
        time = _time(minutes.phases, num_workers)
        while (count := _affordable(minutes.phases.left_s, passes, pass_s, num_workers)) < _FEW:
            if passes // ETA < LEAST_PASSES:
                break
            passes //= ETA
        count = max(_FEW, min(_MANY, count))
        note = f"as many as {request.minutes:g} minutes allow at {1e3 * pass_s:.2g} ms a pass"
    return (
        SearchPlan(count, passes, max(_CLIMBING, count), request.seed, request.max_loss),
        time,
        note,
    )


def _affordable(left_s: float, passes: int, pass_s: float, num_workers: int) -> int:
    amounts = SearchPlan(0, passes, 0, 0, 0.0).rungs
    # for two spaces: a round each, and as many neighbours
    each_s = 2 * pass_s * amounts[0] * (len(amounts) + ETA)
    return int(max(0.0, left_s) * num_workers / each_s)


def _time(phases: Phases, num_workers: int) -> SearchTime:
    """Half of the phase for what loses nothing, the rest for what does."""
    half_s = phases.left_s / 2
    return SearchTime((lambda: phases.left_s < half_s, phases.is_late), at_once=num_workers)

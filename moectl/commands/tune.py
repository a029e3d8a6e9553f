"""`moectl tune`: the fastest policies for a model, a budget and a machine, lossless and within a loss; found by
simulation, verified live, kept as presets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from artifacts import storedpresets
from artifacts.errors import BadInput, BadUsage, Incompatible, Problem
from artifacts.measured import stored_profile
from artifacts.modelshapes import MODELS
from artifacts.provenance import RunInfo, utc_now
from artifacts.shape import Shape
from artifacts.similarity import Similarity
from artifacts.store import Store
from moectl.benchreplay import record_trace
from moectl.bundled import demo_model
from moectl.commands.profile import check_store, model_info
from moectl.opening import open_quietly
from moectl.progress import progress_bar
from moectl.tracesource import Opened, Source, open_source
from moectl.tunerequest import LOSSLESS, Request
from profilers.bench import Text, text_of
from profilers.corpus import documents
from profilers.pace import Pace, pace_of
from profilers.verifying import FULL, Beside, Quality, Verifier, fastest, first_within
from runtime import search as searching
from runtime.locate import locate
from runtime.model import MoeModel
from runtime.policies import presets
from runtime.policies.base import Artefacts
from runtime.search import Found, Plan, Scale, Search, Tried
from runtime.space import Combination
from runtime.stored import load_artefacts, load_similarity

COMMAND = "tune"
RECORDED = 2  # times the tokens that are verified on, in a trace that is recorded first
_SEARCHING = 0.5  # of the minutes; the rest is for live runs
_FEW, _MANY = 9, 2000  # candidates of a space
_MOST_TRIED = 6  # lossy candidates verified live
_SHOWN = 2  # lossless candidates, and published presets, measured live beside each other
_CHECKED = 0.25  # of the requests, kept aside for the check where no other text is given
_BESIDE = ("on-demand", "near", "uniform-bits")


@dataclass(frozen=True, slots=True)
class Pick:
    """One answer: as predicted, as verified. `name`: of the preset that it becomes."""

    name: str
    tried: Tried
    quality: Quality | None
    live: Beside | None


@dataclass(frozen=True, slots=True)
class Check:
    """How much faster a pick is than the best published preset of as small a loss: on what it was tuned on, and on
    other text."""

    name: str
    other: str
    here: float
    there: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """All that is shown. `live`: everything that was measured beside each other, by name; `why`: where there is no
    lossy answer."""

    request: Request
    shape: Shape
    picks: list[Pick]
    found: Found
    live: Mapping[str, Beside]
    qualities: Mapping[Combination, Quality]
    oracle_ms: float
    full_ms: float
    checks: list[Check]
    receipt: Mapping[str, object]
    run: int
    why: str = ""


def tune(name: str | None, request: Request, *, store: Path, device: str, threads: int) -> Tuned:
    """Search, verify, keep. Raises BadUsage, BadInput, Incompatible."""
    torch.set_num_threads(threads)
    started_at, begin_s = utc_now(), perf_counter()
    check_store(store)
    name = name or str(demo_model())
    if name in MODELS and not Path(name).exists():
        raise BadUsage(f"{name} is a shape without weights, and nothing of it can be verified: give a checkpoint")
    for data in filter(None, (request.data, request.held_out, request.check_data)):
        documents(data)  # what leads nowhere is told before anything is measured
    opened = open_quietly(name, device=device)
    text = _text(opened, request.held_out, request, num_tokens=request.tokens)
    known, similarity, profile = _known(store, opened)
    pace = pace_of(
        opened,
        locate(name),
        scaled_to=request.scaled_to,
        link=request.link,
        experts=request.experts,
        artefacts=known,
        profile=profile,
    )
    traced = _trace(name, opened, request, store)
    trace, other, other_name = _parts(name, opened, traced, request, store)
    search = _search(traced, trace, pace, similarity, request)
    verifier = Verifier(opened, known, text, pace, budget=request.budget)
    search.scale = _scale(search, verifier)
    plan, planned = _plan(search, request)
    with progress_bar("searching", unit="replays") as advance:
        found = search.run(plan, progress=advance)
    searched_s = perf_counter() - begin_s
    picks, live, why = _verified(found, verifier, request)
    checks = _checks(picks, found, _search(traced, other, pace, similarity, request), search, request, other_name)
    receipt = {
        "trace": traced.name,
        "passes": f"{plan.rungs[-1]} of {search.num_passes}, in rounds of {', '.join(map(str, plan.rungs))}",
        "candidates": f"{found.num_tried} of {found.num_space} combinations, {found.num_replays} replays ({planned})",
        "left out": f"{sum(found.refused.values())}" + "".join(f"; {n}: {why}" for why, n in found.refused.items()),
        "costs": f"{request.machine_name}, {pace.source}",
        "scale": asdict(search.scale),
        "emulated": dict(pace.settings),
        "seed": request.seed,
        "seconds": f"{searched_s:.0f} until the search was over, {perf_counter() - begin_s:.0f} in all",
        "assumed": search.assumed,
    }
    run = _keep(picks, request, store, name, opened, started_at, perf_counter() - begin_s, receipt)
    last = plan.rungs[-1]
    return Tuned(
        request,
        opened.shape,
        picks,
        found,
        live,
        verifier.measured(),
        search.oracle(last),
        search.full(last),
        checks,
        receipt,
        run,
        why,
    )


# Before the search


def _text(opened: MoeModel, data: str, request: Request, *, num_tokens: int) -> Text:
    if opened.tokenizer is None:
        raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
    texts = documents(data, seed=request.seed)
    return text_of(texts, opened.tokenizer, length=request.length, num_tokens=num_tokens)


def _known(path: Path, opened: MoeModel) -> tuple[Artefacts, Similarity | None, object]:
    if not path.exists():
        return Artefacts(), None, None
    model_id = opened.fingerprint[:16]
    with Store.open(path, read_only=True) as store:
        artefacts = load_artefacts(store, model_id, opened.shape)
        return artefacts, load_similarity(store, model_id, opened.shape), stored_profile(store, model_id)


def _trace(name: str, opened: MoeModel, request: Request, path: Path) -> Opened:
    """The store's newest of this model that decodes one request at a time and foresees; else one recorded now."""
    if path.exists():
        with Store.open(path, read_only=True) as store:
            runs = [run for run in reversed(store.runs()) if "traces" in run.contents]
        model_id = opened.fingerprint[:16]
        for run in (run for run in runs if run.info.model_id == model_id):
            found = open_source(Source(run=run.run_id, store=path))
            if found.trace.predicted is not None and searching.is_one_by_one(found.trace):
                return found
    return _recorded(name, opened, request, path, request.data)


def _recorded(name: str, opened: MoeModel, request: Request, path: Path, data: str) -> Opened:
    text = _text(opened, data, request, num_tokens=RECORDED * request.tokens)
    run = record_trace(name, opened, text, path, data=data, seed=request.seed)
    return open_source(Source(run=run, store=path))


def _parts(name: str, opened: MoeModel, traced: Opened, request: Request, path: Path) -> tuple:
    """The trace to tune on, the one to check on, and how to speak of that."""
    if request.check_data is None:
        return *searching.cut_by_request(traced.trace, _CHECKED), "the last quarter of the requests"
    other = _recorded(name, opened, request, path, request.check_data)
    return traced.trace, other.trace, request.check_data


def _search(traced: Opened, trace: object, pace: Pace, similarity: Similarity | None, request: Request) -> Search:
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


def _scale(search: Search, verifier: Verifier) -> Scale:
    """Nats for a unit of squared error, each of the two kinds by one candidate that is read live: its divergence, which
    few tokens tell better than their perplexity."""
    amount = min(search.num_passes, 4 * searching.LEAST_PASSES)
    slopes: list[float | None] = []
    for part, one in enumerate(
        (Combination(miss="shadow", residency="shadow:slots=no"), Combination(miss="substitute"))
    ):
        try:
            damage = search.replay(one, amount).damage[part]
            slopes.append(verifier.quality(one, briefly=True).kl / damage if damage else None)
        except Problem:
            slopes.append(None)
    return Scale(*slopes)


def _plan(search: Search, request: Request) -> tuple[Plan, str]:
    """As many candidates as the time allows, by how fast a replay is; or as many as are asked for."""
    passes = min(search.num_passes, searching.MOST_PASSES)
    if request.candidates is not None:
        count, told = request.candidates, "as many as were asked for"
    else:
        pass_s = search.seconds_a_pass()
        plan = Plan(0, passes, 0, request.seed, request.max_loss)
        each_s = 2 * pass_s * len(plan.rungs) * plan.rungs[0]
        count = int(_SEARCHING * 60 * request.minutes / each_s)
        count = max(_FEW, min(_MANY, count))
        told = f"as many as {request.minutes:g} minutes allow at {1e3 * pass_s:.2g} ms a pass"
    return Plan(count, passes, count // 3, request.seed, request.max_loss), told


# After it


def _verified(found: Found, verifier: Verifier, request: Request) -> tuple[list[Pick], dict[str, Beside], str]:
    """The answers: of the fastest lossless ones the one that is fastest live; of the others the first that is good
    enough live. Both beside the best published ones."""
    if not found.lossless:
        raise Incompatible(f"nothing lossless runs at --budget {request.budget}: give more")
    exact = {f"{request.name}{LOSSLESS} ({n})": one for n, one in enumerate(found.lossless[: _SHOWN + 1], 1)}
    candidates = found.lossy if request.max_loss else []
    lossy, _ = first_within(verifier, candidates, request.max_loss, most=_MOST_TRIED)
    named = {name: one.combination for name, one in exact.items()}
    if lossy:
        named[request.name] = lossy.combination
    rivals = _rivals(found, request.max_loss)
    with progress_bar("measuring", unit="readings") as advance:
        live = verifier.beside(
            named | {name: name for name in (*_BESIDE, *rivals)},
            rounds=request.rounds,
            seed=request.seed,
            progress=advance,
        )
    chosen = fastest(live, exact)
    if chosen is None:
        raise Incompatible("none of the lossless candidates ran live")
    best = exact[chosen]
    kept = {name: one for name, one in live.items() if name not in exact or name == chosen}
    lossless = Pick(f"{request.name}{LOSSLESS}", best, _quality(verifier, best.combination), kept.pop(chosen))
    kept[lossless.name] = lossless.live
    if lossy is None:
        why = "" if not request.max_loss else _why(found, request)
        return [lossless, Pick(request.name, best, lossless.quality, lossless.live)], kept, why
    pick = Pick(request.name, lossy, verifier.quality(lossy.combination), kept.get(request.name))
    if pick.live and pick.live.to_full > lossless.live.to_full:
        why = "the best that loses something is no faster live than the best that loses nothing"
        return [lossless, Pick(request.name, best, lossless.quality, lossless.live)], kept, why
    return [lossless, pick], kept, ""


def _quality(verifier: Verifier, combination: Combination) -> Quality | None:
    try:
        return verifier.quality(combination)
    except Problem:
        return None


def _why(found: Found, request: Request) -> str:
    if not any(one.loss is not None for one in found.lossy):
        return "no candidate that loses something has a measured loss: run `moectl profile` and `moectl quantize`"
    return f"none of the {_MOST_TRIED} most promising kept within {100 * request.max_loss:g} % of perplexity live"


def _rivals(found: Found, max_loss: float) -> list[str]:
    """Published presets that are measured too: the fastest lossless ones, and the fastest that are predicted to lose no
    more than is allowed, or a little more."""
    published = published_of_others(found)
    by_time = sorted(published, key=lambda name: published[name].ms)
    exact = [name for name in by_time if published[name].is_lossless][:_SHOWN]
    near = [name for name in by_time if _within(published[name], 2 * max_loss)][:_SHOWN]
    return list(dict.fromkeys((*exact, *near)))


def published_of_others(found: Found) -> dict[str, Tried]:
    """Presets that come from a paper, not from here."""
    return {name: one for name, one in found.published.items() if not presets()[name].paper.startswith("moectl")}


def _within(one: Tried, max_loss: float) -> bool:
    return one.loss is not None and 0 < one.loss <= max_loss


def _checks(
    picks: list[Pick], found: Found, other: Search, search: Search, request: Request, other_name: str
) -> list[Check]:
    """On the other trace, replayed as far as the search's: each pick beside the published presets it stood beside."""
    amount = min(other.num_passes, search.num_passes, searching.MOST_PASSES)
    other.scale = search.scale
    checks = []
    for pick in picks:
        rivals = [one for one in published_of_others(found).values() if one.loss is not None]
        rivals = [one for one in rivals if one.loss <= (0 if pick.tried.is_lossless else request.max_loss)]
        if not rivals:
            continue
        here = 1 - pick.tried.ms / min(one.ms for one in rivals)
        theirs = min(other.replay(one.combination, amount).ms for one in rivals)
        there = 1 - other.replay(pick.tried.combination, amount).ms / theirs
        checks.append(Check(pick.name, other_name, here, there))
    return checks


def _keep(
    picks: list[Pick],
    request: Request,
    path: Path,
    name: str,
    opened: MoeModel,
    started_at: object,
    seconds: float,
    receipt: Mapping[str, object],
) -> int:
    rows = [
        storedpresets.StoredPreset(
            pick.name,
            **pick.tried.combination._asdict(),
            budget=request.budget,
            machine=request.machine_name,
            max_loss=0.0 if pick.tried.is_lossless else request.max_loss,
            tpot_ms=pick.live.measured.tpot_ms.median if pick.live else None,
            perplexity_ratio=1 + pick.quality.loss if pick.quality else None,
        )
        for pick in picks
    ]
    model = model_info(name, opened)
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=seconds,
        data=request.data,
        tokens=request.tokens,
        seed=request.seed,
        parameters={"asked": asdict(request), "receipt": dict(receipt), "full": FULL},
    )
    with Store.open(path) as store:
        store.add_model(model)
        return store.write_run(info, {storedpresets.TABLE: storedpresets.to_rows(rows)})

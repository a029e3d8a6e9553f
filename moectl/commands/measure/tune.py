"""`moectl tune`: the fastest policies for a model, a budget and a machine, lossless and within a
loss; found by simulation, verified live, kept as presets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.shape import FULL_BITS
from artifacts.store.runs import RunInfo, utc_now
from moectl.bundled import demo_model
from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    Base,
    Budget,
    Clients,
    Device,
    Executor,
    Experts,
    HalvedLength,
    Json,
    Link,
    Model,
    ScaledTo,
    Seed,
    StorePath,
    Threads,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    import pyarrow as pa

    from artifacts.routing.similarity import Similarity
    from artifacts.traces.trace import Trace
    from moectl.shared.trace_source import OpenedTrace
    from moectl.tune.request import TuneRequest
    from moectl.tune.result import Pick, Tuned
    from moectl.tune.timing import Minutes
    from profilers.compare.verify_search import Verifier
    from profilers.hardware.live_costs import LiveCosts
    from runtime.model.open import MoeModel
    from runtime.search.results import SearchPlan, SearchResult
    from runtime.search.search import Search

COMMAND = "tune"
_ALONE = (
    "{}, simulated: predicted times are between two tokens of a client; live ones are of one "
    "request at a time"
)


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options of a search: its goal, its duration, and the text to verify the picks on."""

    budget: Budget = "25%"
    scaled_to: ScaledTo = None
    link: Link = "auto"
    max_loss: Annotated[
        str, typer.Option(help="Of perplexity, at most: 0.5%, or 0 for lossless alone.")
    ] = "0.5%"
    minutes: Annotated[float, typer.Option(help="How long all of it takes, about.")] = 3.0
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="Combinations to try of each kind, whatever time that takes."),
    ] = None
    data: Annotated[str, typer.Option(help="Text to record a trace on, if the store has none.")] = (
        "builtin"
    )
    held_out: Annotated[str, typer.Option(help="Text to verify on.")] = "builtin:held-out"
    check_data: Annotated[
        str | None,
        typer.Option(help="Text of another kind, to see what the picks are worth there."),
    ] = None
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to verify on.")] = 2048
    length: HalvedLength = 128
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured live.")] = 5
    base: Base = 16
    experts: Experts = "exact"
    name: Annotated[str, typer.Option(help="The preset that the pick becomes.")] = "tuned"
    clients: Clients = None
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Candidates replayed at a time, each in a process of its own."),
    ] = None
    executor: Executor = "local"
    device: Device = "auto"
    threads: Threads = DEFAULT_THREADS
    seed: Seed = 0


def tune(
    *,
    model: Model = None,
    options: TuneOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Find the fastest policies for a model and a machine.

    One answer loses nothing, the other no more than --max-loss; `moectl run --preset` takes both by
    name.
    """
    with importing():
        import torch

        from moectl.shared.stores import check_store
        from moectl.shared.terminal.progress import Phases
        from moectl.tune.request import TuneRequest, share
        from moectl.tune.table import show
        from moectl.tune.timing import SHARES, Minutes

    request = fill(TuneRequest, options, max_loss=share(options.max_loss))
    with resumable("a trace that was recorded whole is kept"):
        torch.set_num_threads(options.threads)
        check_store(store)
        name = model or str(demo_model())
        _check(request)
        with Phases(*SHARES, limit_s=request.limit_s, is_quiet=json) as phases:
            tuned = _tune(name, request, Minutes(phases), store=store, device=options.device)
    show(tuned, as_json=json)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A search that is ready to run, and what its picks are verified with."""

    checkpoint: "MoeModel"
    based: "MoeModel"  # the checkpoint with its experts on the base's bits
    traced: "OpenedTrace"
    search: "Search"
    verifier: "Verifier"
    pace: "LiveCosts"
    similarity: "Similarity | None"
    other: "Trace"  # requests that the search does not see, to check its picks on
    other_name: str


def _tune(
    name: str, request: "TuneRequest", minutes: "Minutes", *, store: Path, device: str
) -> "Tuned":
    from moectl.tune.prepare import search_on
    from moectl.tune.result import LEFT_OUT, Tuned
    from moectl.tune.verify import checks_of, verified

    started_at = utc_now()
    phases = minutes.phases
    prepared = _prepare(name, request, minutes, store=store, device=device)
    search = prepared.search
    verifier = prepared.verifier
    found, plan, planned = _searched(search, request, minutes)
    result = verified(found, verifier, request, minutes)
    check_search = search_on(
        prepared.traced, prepared.other, prepared.pace, prepared.similarity, request
    )
    checks = checks_of(
        result.picks, found, check_search, search, request, prepared.other_name, minutes
    )
    receipt = _receipt(name, request, prepared, plan, found, planned) | {
        LEFT_OUT: minutes.left_out,
        "seconds": {name: round(seconds, 1) for name, seconds in phases.seconds().items()},
        "assumed": search.assumed,
    }
    run = _keep(
        result.picks,
        request,
        store,
        name,
        prepared.checkpoint,
        started_at,
        phases.elapsed_s,
        receipt,
    )
    oracle_ms = search.oracle(plan.rungs[-1])
    full_ms = search.full(plan.rungs[-1])
    return Tuned(
        request,
        prepared.based.shape,
        result.picks,
        found,
        result.live,
        verifier.measured(),
        oracle_ms,
        full_ms,
        checks,
        receipt,
        run,
        result.why,
    )


def _searched(
    search: "Search", request: "TuneRequest", minutes: "Minutes"
) -> tuple["SearchResult", "SearchPlan", str]:
    """Run the search; return its result, its plan and a note on its size."""
    from moectl.shared.terminal.progress import progress_bar
    from moectl.tune.distribute import spread
    from moectl.tune.prepare import plan_for
    from profilers.workers.choose import replaying

    minutes.phases.begin("searching")
    with replaying(request.executor, request.jobs) as executor:
        plan, time, planned = plan_for(search, request, minutes, num_workers=executor.count)
        with (
            progress_bar("searching", unit="replays") as advance,
            spread(search, executor) as replay_all,
        ):
            found = search.run(plan, progress=advance, replay_all=replay_all, time=time)
    if found.num_untried:
        minutes.left_out.append(f"{found.num_untried} replays of the search")
    return found, plan, planned


def _check(request: "TuneRequest") -> None:
    """Raise, before anything is measured, for a wrong path to a text."""
    from profilers.text.corpus import documents

    for data in filter(None, (request.data, request.held_out, request.check_data)):
        documents(data)


def _prepare(
    name: str, request: "TuneRequest", minutes: "Minutes", *, store: Path, device: str
) -> _Prepared:
    """Open the model, find or record a trace, and measure what a unit of expert error costs."""
    from moectl.shared.opening import open_quietly
    from moectl.shared.place_trace import trace_on_base
    from moectl.shared.text import read_text
    from moectl.tune.prepare import known_of, pace_of, parts_of, scale_of, search_on, trace_for
    from moectl.tune.timing import token_seconds
    from profilers.compare.verify_search import Verifier
    from runtime.model.files.locate import locate
    from runtime.session.equip import model_on_base

    begin = minutes.phases.begin
    begin("opening the model")
    opened = open_quietly(name, device=device)
    text = read_text(
        opened,
        request.held_out,
        length=request.length,
        num_tokens=request.tokens,
        seed=request.seed,
    )
    artefacts, similarity, profile = known_of(store, opened, base=request.base)
    if text.shortfall:
        minutes.left_out.append(f"text to verify on: only {text.shortfall}")
    based, artefacts = model_on_base(opened, artefacts, request.base)
    begin("measuring costs")
    pace = pace_of(based, request, artefacts, profile, locate(name), minutes)
    resident_s, loading_s = (
        token_seconds(pace.costs, based.shape, loads=loads) for loads in (False, True)
    )
    begin("taking or recording a trace")
    traced = trace_for(name, opened, request, store, minutes, token_s=loading_s)
    trace, other, other_name = parts_of(name, opened, traced, request, minutes, token_s=loading_s)
    traced = trace_on_base(traced, request.base)
    search = search_on(traced, trace, pace, similarity, request)
    begin("reading by the full model")
    text = minutes.cut(text, "the held-out text", token_s=resident_s, least=2)
    verifier = Verifier(based, artefacts, text, pace, budget=request.budget)
    begin("measuring what errors cost")
    search.scale = scale_of(search, verifier, minutes)
    return _Prepared(opened, based, traced, search, verifier, pace, similarity, other, other_name)


def _receipt(
    name: str,
    request: "TuneRequest",
    prepared: _Prepared,
    plan: "SearchPlan",
    found: "SearchResult",
    planned: str,
) -> dict[str, object]:
    search = prepared.search
    pace = prepared.pace
    return {
        "model": name,
        "trace": prepared.traced.name,
        "passes": (
            f"{plan.rungs[-1]} of {search.num_passes}, in rounds of "
            f"{', '.join(map(str, plan.rungs))}"
        ),
        "candidates": (
            f"{found.num_tried} of {found.num_space} combinations, {found.num_replays} "
            f"replays ({planned})"
        ),
        "left out": f"{sum(found.refused.values())}"
        + "".join(f"; {n}: {why}" for why, n in found.refused.items()),
        "base": _against(prepared.verifier, prepared.checkpoint, request.base),
        "costs": f"{request.machine_name}, {pace.source}",
        "scale": asdict(search.scale),
        "losses": (
            f"of {prepared.verifier.num_scored:,} scored tokens of {request.held_out} (+- "
            "standard error)"
        ),
        "emulated": dict(pace.settings),
        "seed": request.seed,
        **({"clients": _ALONE.format(request.served.shown)} if request.served else {}),
    }


def _against(verifier: "Verifier", checkpoint: "MoeModel", bits: int) -> str:
    """Say what losses are measured against, for the receipt."""
    from moectl.bench.table import loss_of_base

    if bits == FULL_BITS:
        return f"the checkpoint, experts in {checkpoint.expert_format}"
    return loss_of_base(verifier.loss_of_base(checkpoint), bits)


def _keep(
    picks: list["Pick"],
    request: "TuneRequest",
    path: Path,
    name: str,
    opened: "MoeModel",
    started_at: datetime,
    seconds: float,
    receipt: Mapping[str, object],
) -> int:
    from artifacts.store.presets import TABLE
    from artifacts.store.store import add_run
    from moectl.shared.opening import model_info

    model = model_info(name, opened)
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=seconds,
        data=request.data,
        tokens=request.tokens,
        seed=request.seed,
        parameters={
            "asked": asdict(request),
            "receipt": dict(receipt),
            "quality": {pick.name: asdict(pick.quality) for pick in picks if pick.quality},
        },
    )
    return add_run(path, info, {TABLE: _rows(picks, request)}, model=model)


def _rows(picks: list["Pick"], request: "TuneRequest") -> "pa.Table":
    from artifacts.store.presets import StoredPreset, to_rows

    rows = [
        StoredPreset(
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
    return to_rows(rows)

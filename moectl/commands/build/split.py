"""`moectl split`: solve each layer's budget, cache size and split ratio from a trace and latencies,
into the store."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Incompatible
from artifacts.hardware import profile as measured
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import HERE, Machine, machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from moectl.bundled import demo_model
from moectl.cli import completion
from moectl.cli.groups import fill
from moectl.cli.options import Budget, Json, NumExperts, OfTrace, StorePath, known_machine
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable
from runtime.control import sizes

if TYPE_CHECKING:
    from artifacts.splits.solve import Answer, Latencies, SolvedSplit
    from artifacts.traces.curves import Curves
    from moectl.shared.trace_source import OpenedTrace, TraceSource
    from moectl.show.grounds import Grounds
    from moectl.show.render import Sheet

COMMAND = "split"
REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """The trace, the machine whose latencies count, and how to solve."""

    trace: Annotated[
        Path | None,
        typer.Option(help="A Parquet trace with predictions, as `moectl run` writes it."),
    ] = None
    run: OfTrace = None
    synthetic: Annotated[
        str | None, typer.Option(help="Make a trace: skew=0.8,locality=0.4,...")
    ] = None
    num_experts: NumExperts = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Whose trace: a folder, bundled, or a name as mixtral-8x7b for its shape alone."
        ),
    ] = None
    machine: Annotated[
        str,
        typer.Option(
            help="Whose latencies: a named machine's, or here: the store's hardware profile.",
            autocompletion=completion.machines,
            callback=known_machine,
        ),
    ] = "here"
    link: Annotated[
        str | None, typer.Option(help="Which link of the hardware profile; else the one of a run.")
    ] = None
    budget: Budget = "25%"
    solver: Annotated[
        str,
        typer.Option(
            help=(
                "dynamic; greedy, as published; or replay: of both and of even cuts what runs "
                "the trace fastest."
            )
        ),
    ] = "replay"
    zeta: Annotated[
        float, typer.Option(help="Share of the whole budget that greedy moves at a time.")
    ] = 0.01
    eviction: Annotated[
        str, typer.Option(help="What the caches evict by, as in the run that follows the split.")
    ] = "lcp"


@dataclass(frozen=True, slots=True)
class SplitMachine:
    """The machine that a split is for, and its latencies. `basis` is their origin: the name of the
    machine, or the run that measured them, its machine and link. `costs` is None where nothing was
    measured."""

    machine: Machine
    latencies: "Latencies"
    basis: dict[str, object]
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class StoredSplit:
    """A split, how it was solved and from what. `exposed_ms` is the exposed stall of a token over
    all layers in the solvers' model: for this split, for equal budgets and for the other
    solvers."""

    run_id: int
    answer: "Answer"
    curves: "Curves"
    parameters: dict[str, object]
    source: str
    target: SplitMachine
    exposed_ms: dict[str, float]
    how: str
    assumed: tuple[str, ...]


def split(
    *,
    options: SplitOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Share a budget between layers, and split experts.

    So that compute waits least (MoEpic).
    """
    with importing():
        from moectl.shared.trace_source import TraceSource
        from moectl.show import splits as views
        from moectl.show.render import show_json, show_sheet

    source = fill(TraceSource, options, store=store)
    _check(options)
    solved = _split(source, options)
    sheet = _layers(solved)
    if json:
        summary = {
            "run": solved.run_id,
            "trace": solved.source,
            **solved.parameters,
            "exposed_ms": solved.exposed_ms,
        }
        show_json(
            summary
            | {"how": solved.how, "layers": sheet.records(), "assumed": list(solved.assumed)}
        )
        return
    show_sheet(views.with_bars(sheet, solved.curves.prediction.shape[1]))
    for line in solved.assumed:
        print(f"assumed: {line}")


def _check(options: SplitOptions) -> None:
    """Raise BadUsage for a value that is not understood."""
    from artifacts.splits.solve import SOLVERS
    from runtime.policies import parse

    if options.machine != HERE:
        machine(options.machine)
        if options.link is not None:
            raise BadUsage("--link picks from a hardware profile: leave it out with --machine")
    if options.solver not in (*SOLVERS, REPLAY):
        raise BadUsage(unknown("solver", options.solver, (*SOLVERS, REPLAY)))
    parse("eviction", options.eviction)


@resumable()
def _split(source: "TraceSource", options: SplitOptions) -> StoredSplit:
    """Measure the curves of the trace, solve, and write both to the store.

    Raises BadUsage, BadInput (no store, a trace that cannot tell) or Incompatible (no hardware
    profile).
    """
    from artifacts.store.rows import curve_rows, split_rows
    from artifacts.store.store import add_run
    from moectl.shared.trace_source import open_source
    from runtime.control.splits.split_solver import answer_of, curves_of
    from runtime.policies import parse

    started_at = utc_now()
    start_s = time.monotonic()
    opened = open_source(source)
    info = _named_model(source, opened)
    model_id = info.model_id if info else opened.model_id
    target = _machine_for(source.store, options, opened.model, model_id)
    curves = curves_of(opened.trace, opened.model.shape, parse("eviction", options.eviction))
    answers = _solve(options, opened.model, target.latencies, curves)
    found_by = options.solver
    by_replay = None
    if options.solver == REPLAY:
        by_replay = _replayed(options, opened, target)
        found_by = by_replay.solver
        answers[REPLAY] = answer_of(curves, opened.model.shape, by_replay)
    exposed_ms = {name: float(answer[1].sum()) * 1e3 for name, answer in answers.items()}
    answer = answers[options.solver]
    outcome = {"exposed_ms": exposed_ms[options.solver], "found_by": found_by}
    parameters = _parameters(options, opened, target) | outcome
    tables = {
        "curves": curve_rows(curves.hit, curves.prediction, curves.prediction_hit),
        "splits": split_rows(*answer),
    }
    run = RunInfo(
        command=COMMAND,
        model_id=model_id,
        started_at=started_at,
        seconds=time.monotonic() - start_s,
        data=opened.name if opened.run is None else f"run {opened.run}",
        data_digest=opened.trace.digest(),
        tokens=int((opened.trace.layer == 0).sum()),
        parameters=parameters,
    )
    run_id = add_run(source.store, run, tables, model=info)
    assumed = (*opened.trace.assumed, *opened.model.assumed)
    how = by_replay.source if by_replay else f"solver {options.solver}"
    return StoredSplit(
        run_id, answer, curves, parameters, opened.name, target, exposed_ms, how, assumed
    )


def _layers(solved: StoredSplit) -> "Sheet":
    """Return a table with a row for each layer."""
    from moectl.show import splits as views
    from moectl.show.grounds import simulated

    curves = solved.curves
    asked = solved.parameters
    on = simulated(solved.target.machine.name, Shape(**asked["shape"]).nbytes)
    note = (
        f"run {solved.run_id}: {solved.answer[0].sum():.6g} experts ({asked['budget']}), "
        f"{solved.how}\nexposed a token: {_totals(solved, on)}\n{_latencies_note(solved, on)}"
    )
    shown = (curves.hit, curves.prediction, curves.prediction_hit)
    return views.splits(
        solved.answer, shown, on, title=f"Split of {asked['model']} by {solved.source}", note=note
    )


def _totals(solved: StoredSplit, on: "Grounds") -> str:
    """Return the stall of a token by solver: in milliseconds, or over the stall of equal
    budgets."""
    from artifacts.splits.solve import EVEN

    even = solved.exposed_ms[EVEN]
    if on.is_absolute or not even:
        return ", ".join(f"{name} {value:.4g} ms" for name, value in solved.exposed_ms.items())
    return (
        ", ".join(f"{name} {value / even:.3g}" for name, value in solved.exposed_ms.items())
        + f" (of {EVEN})"
    )


def _named_model(source: "TraceSource", opened: "OpenedTrace") -> ModelInfo | None:
    """Return the model whose folder the user named beside a trace that does not say whose it is."""
    if source.model is None or opened.model_id is not None:
        return None
    name = str(demo_model()) if source.model == "bundled" else source.model
    if not Path(name).is_dir():
        return None
    from moectl.shared.opening import model_info, open_quietly

    return model_info(name, open_quietly(name, device="cpu"))


def _machine_for(
    path: Path, options: SplitOptions, model: ModelShape, model_id: str | None
) -> SplitMachine:
    from artifacts.store.hardware_profiles import stored_profile
    from artifacts.store.store import Store
    from runtime.control.splits.split_solver import latencies_of
    from runtime.replay.measured_machine import costs_of, machine_of

    if options.machine != HERE:
        named = machine(options.machine)
        latencies = latencies_of(Costs.of(model, named), model.shape.top_k)
        return SplitMachine(named, latencies, {"machine": options.machine})
    missing = Incompatible(
        f"{path} holds no hardware profile of this model: {measured.REMEDY}, or name a --machine"
    )
    if model_id is None or not path.exists():
        raise missing
    with Store.open(path, read_only=True) as store:
        run = store.latest_run(measured.COMMAND, model_id)
        profile = stored_profile(store, model_id)
    if profile is None:
        raise missing
    load = profile.load(options.link)
    decode = profile.decode
    costs = costs_of(profile, model.shape, link=options.link)
    seconds = {
        "attention_s": decode.attention.median,
        "moe_s": decode.moe.median,
        "head_s": decode.head.median,
    }
    latencies = replace(latencies_of(costs, model.shape.top_k), **seconds)
    basis = {"hardware_run": run.run_id, "hardware": list(profile.machine), "link": load.link}
    return SplitMachine(
        machine_of(profile, model.shape, link=options.link), latencies, basis, costs
    )


def _latencies_note(solved: StoredSplit, on: "Grounds") -> str:
    seconds = solved.target.latencies
    parts = (
        ("attention", seconds.attention_s),
        ("experts", seconds.moe_s),
        ("head", seconds.head_s),
        ("an expert's bytes", seconds.load_s),
        ("each transfer's latency", seconds.latency_s),
        ("the engine's work on it", seconds.host_s),
    )
    basis = solved.target.basis
    name = basis.get("machine") or f"hardware run {basis['hardware_run']} over {basis['link']}"
    if on.is_absolute:
        return f"{name}: " + ", ".join(f"{part} {took_s * 1e3:.4g} ms" for part, took_s in parts)
    return f"{name}, in loads of an expert: " + ", ".join(
        f"{part} {took_s / seconds.load_s:.3g}"
        for part, took_s in parts
        if took_s is not seconds.load_s
    )


def _solve(
    options: SplitOptions, model: ModelShape, latencies: "Latencies", curves: "Curves"
) -> dict[str, "Answer"]:
    """Solve with every solver, and with equal budgets."""
    import numpy as np

    from artifacts.splits.solve import EVEN, SOLVERS
    from runtime.control.splits.split_solver import solve, split_problem

    shape = model.shape
    nbytes = sizes.budget_nbytes(options.budget, shape)
    by_solver = {
        solver: solve(curves, shape, nbytes, latencies, solver=solver, zeta=options.zeta)
        for solver in SOLVERS
    }
    even = np.full(shape.num_layers, nbytes / shape.expert_nbytes / shape.num_layers)
    return {EVEN: split_problem(curves, shape, latencies).split(even), **by_solver}


def _replayed(options: SplitOptions, opened: "OpenedTrace", target: SplitMachine) -> "SolvedSplit":
    """Replay the trace with each split: those the solvers find, and even cuts. Return the fastest
    one."""
    from runtime.replay.settings import Setting as Tried
    from runtime.replay.workload import Workload

    workload = Workload(
        opened.trace, opened.model, target.machine, artefacts=opened.artefacts, costs=target.costs
    )
    policies = {"residency": "split:theta=None", "eviction": options.eviction}
    return workload.solved(Tried("", "moepic", policies, budget=options.budget), zeta=options.zeta)


def _parameters(
    options: SplitOptions, opened: "OpenedTrace", target: SplitMachine
) -> dict[str, object]:
    """Return the parameters by which a run recognises a split that was made for something else."""
    from artifacts.traces.trace import PHASES
    from runtime.control.splits.split_solver import counted_phases

    shape = opened.model.shape
    return ({} if opened.run is None else {"trace_run": opened.run}) | {
        "model": opened.model.name,
        "shape": asdict(shape),
        "budget": options.budget,
        "budget_bytes": sizes.budget_nbytes(options.budget, shape),
        **target.basis,
        "latencies": asdict(target.latencies),
        "solver": options.solver,
        "zeta": options.zeta,
        "eviction": options.eviction,
        "phases": [PHASES[phase] for phase in counted_phases(opened.trace)],
    }

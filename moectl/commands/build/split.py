"""`moectl split`: solve each layer's budget, cache size and split ratio from a trace and latencies,
into the store."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Incompatible
from artifacts.hardware import profile as measured
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import HERE, Machine, machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.splits.solve import EVEN, SOLVERS, Answer, Latencies, SolvedSplit
from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.rows import curve_rows, split_rows
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store, add_run
from artifacts.traces.curves import Curves
from artifacts.traces.trace import PHASES
from moectl.bundled import demo_model
from moectl.shared.resuming import resumable
from moectl.shared.trace_source import OpenedTrace, TraceSource, open_source
from moectl.show import splits as split_views
from moectl.show.grounds import Grounds, simulated
from moectl.show.render import Sheet, show_json, show_sheet
from runtime.control import sizes
from runtime.control.split_solver import (
    answer_of,
    counted_phases,
    curves_of,
    latencies_of,
    solve,
    split_problem,
)
from runtime.policies import parse
from runtime.replay.measured_machine import costs_of, machine_of
from runtime.replay.settings import Setting as Tried
from runtime.replay.workload import Workload

COMMAND = "split"
REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """Request for a split.

    Latencies are those of a named machine. With `here` they come from the store's newest hardware
    profile of the model, over its own link unless `link` names one. The caches of the curves evict
    by `eviction`. Raises BadUsage for a value that is not understood.
    """

    budget: str = "25%"
    machine: str = HERE
    link: str | None = None
    solver: str = REPLAY
    zeta: float = 0.01
    eviction: str = "lcp"

    def __post_init__(self) -> None:
        if self.machine != HERE:
            machine(self.machine)
            if self.link is not None:
                raise BadUsage("--link picks from a hardware profile: leave it out with --machine")
        if self.solver not in (*SOLVERS, REPLAY):
            raise BadUsage(unknown("solver", self.solver, (*SOLVERS, REPLAY)))
        parse("eviction", self.eviction)


@dataclass(frozen=True, slots=True)
class SplitMachine:
    """The machine that a split is for, and its latencies. `basis` is their origin: the name of the
    machine, or the run that measured them, its machine and link. `costs` is None where nothing was
    measured."""

    machine: Machine
    latencies: Latencies
    basis: dict[str, object]
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class StoredSplit:
    """A split, how it was solved and from what. `exposed_ms` is the exposed stall of a token over
    all layers in the solvers' model: for this split, for equal budgets and for the other
    solvers."""

    run_id: int
    answer: Answer
    curves: Curves
    parameters: dict[str, object]
    source: str
    target: SplitMachine
    exposed_ms: dict[str, float]
    how: str
    assumed: tuple[str, ...]


@resumable()
def split(source: TraceSource, request: SplitRequest) -> StoredSplit:
    """Measure the curves of the source's trace, solve, and write both to the store.

    Raises BadUsage, BadInput (no store, a trace that cannot tell) or Incompatible (no hardware
    profile).
    """
    started_at = utc_now()
    start_s = time.monotonic()
    opened = open_source(source)
    info = _named_model(source, opened)
    model_id = info.model_id if info else opened.model_id
    target = _machine_for(source.store, request, opened.model, model_id)
    curves = curves_of(opened.trace, opened.model.shape, parse("eviction", request.eviction))
    answers = _solve(request, opened.model, target.latencies, curves)
    found_by = request.solver
    by_replay = None
    if request.solver == REPLAY:
        by_replay = _replayed(request, opened, target)
        found_by = by_replay.solver
        answers[REPLAY] = answer_of(curves, opened.model.shape, by_replay)
    exposed_ms = {name: float(answer[1].sum()) * 1e3 for name, answer in answers.items()}
    answer = answers[request.solver]
    outcome = {"exposed_ms": exposed_ms[request.solver], "found_by": found_by}
    parameters = _parameters(request, opened, target) | outcome
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
    how = by_replay.source if by_replay else f"solver {request.solver}"
    return StoredSplit(
        run_id, answer, curves, parameters, opened.name, target, exposed_ms, how, assumed
    )


def show(solved: StoredSplit, *, as_json: bool) -> None:
    """Print the layers with a bar for each, or one JSON object."""
    sheet = layers(solved)
    if as_json:
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
    show_sheet(split_views.with_bars(sheet, solved.curves.prediction.shape[1]))
    for line in solved.assumed:
        print(f"assumed: {line}")


def layers(solved: StoredSplit) -> Sheet:
    """Return a table with a row for each layer."""
    curves = solved.curves
    asked = solved.parameters
    on = simulated(solved.target.machine.name, Shape(**asked["shape"]).nbytes)
    note = (
        f"run {solved.run_id}: {solved.answer[0].sum():.6g} experts ({asked['budget']}), "
        f"{solved.how}\nexposed a token: {_totals(solved, on)}\n{_latencies_note(solved, on)}"
    )
    shown = (curves.hit, curves.prediction, curves.prediction_hit)
    return split_views.splits(
        solved.answer, shown, on, title=f"Split of {asked['model']} by {solved.source}", note=note
    )


def _totals(solved: StoredSplit, on: Grounds) -> str:
    """Return the stall of a token by solver: in milliseconds, or over the stall of equal
    budgets."""
    even = solved.exposed_ms[EVEN]
    if on.is_absolute or not even:
        return ", ".join(f"{name} {value:.4g} ms" for name, value in solved.exposed_ms.items())
    return (
        ", ".join(f"{name} {value / even:.3g}" for name, value in solved.exposed_ms.items())
        + f" (of {EVEN})"
    )


def _named_model(source: TraceSource, opened: OpenedTrace) -> ModelInfo | None:
    """Return the model whose folder the user named beside a trace that does not say whose it is."""
    if source.model is None or opened.model_id is not None:
        return None
    name = str(demo_model()) if source.model == "bundled" else source.model
    if not Path(name).is_dir():
        return None
    from moectl.shared.opening import open_quietly

    model = open_quietly(name, device="cpu")
    return ModelInfo(name, model.fingerprint, model.family, model.shape)


def _machine_for(
    path: Path, request: SplitRequest, model: ModelShape, model_id: str | None
) -> SplitMachine:
    if request.machine != HERE:
        named = machine(request.machine)
        latencies = latencies_of(Costs.of(model, named), model.shape.top_k)
        return SplitMachine(named, latencies, {"machine": request.machine})
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
    load = profile.load(request.link)
    decode = profile.decode
    costs = costs_of(profile, model.shape, link=request.link)
    seconds = {
        "attention_s": decode.attention.median,
        "moe_s": decode.moe.median,
        "head_s": decode.head.median,
    }
    latencies = replace(latencies_of(costs, model.shape.top_k), **seconds)
    basis = {"hardware_run": run.run_id, "hardware": list(profile.machine), "link": load.link}
    return SplitMachine(
        machine_of(profile, model.shape, link=request.link), latencies, basis, costs
    )


def _latencies_note(solved: StoredSplit, on: Grounds) -> str:
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
    request: SplitRequest, model: ModelShape, latencies: Latencies, curves: Curves
) -> dict[str, Answer]:
    """Solve with every solver, and with equal budgets."""
    shape = model.shape
    nbytes = sizes.budget_nbytes(request.budget, shape)
    by_solver = {
        solver: solve(curves, shape, nbytes, latencies, solver=solver, zeta=request.zeta)
        for solver in SOLVERS
    }
    even = np.full(shape.num_layers, nbytes / shape.expert_nbytes / shape.num_layers)
    return {EVEN: split_problem(curves, shape, latencies).split(even), **by_solver}


def _replayed(request: SplitRequest, opened: OpenedTrace, target: SplitMachine) -> SolvedSplit:
    """Replay the trace with each split: those the solvers find, and even cuts. Return the fastest
    one."""
    workload = Workload(
        opened.trace, opened.model, target.machine, artefacts=opened.artefacts, costs=target.costs
    )
    policies = {"residency": "split:theta=None", "eviction": request.eviction}
    return workload.solved(Tried("", "moepic", policies, budget=request.budget), zeta=request.zeta)


def _parameters(
    request: SplitRequest, opened: OpenedTrace, target: SplitMachine
) -> dict[str, object]:
    """Return the parameters by which a run recognises a split that was made for something else."""
    shape = opened.model.shape
    return ({} if opened.run is None else {"trace_run": opened.run}) | {
        "model": opened.model.name,
        "shape": asdict(shape),
        "budget": request.budget,
        "budget_bytes": sizes.budget_nbytes(request.budget, shape),
        **target.basis,
        "latencies": asdict(target.latencies),
        "solver": request.solver,
        "zeta": request.zeta,
        "eviction": request.eviction,
        "phases": [PHASES[phase] for phase in counted_phases(opened.trace)],
    }

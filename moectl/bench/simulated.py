"""A simulated bench: the settings of a live one, and the oracle, replayed from a trace on virtual
time."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter

import torch

from artifacts.errors import Partly, Problem
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store, add_run
from artifacts.traces.parquet import to_table
from artifacts.traces.trace import Trace
from moectl.bench.ledger import SIMULATED, BenchJob, BenchRow, Ledger, artefact_runs, simulated_row
from moectl.bench.request import AUTO, DEFAULT_MACHINE, ORACLE, BenchRequest
from moectl.bench.table import Benched
from moectl.shared.opening import model_info, open_quietly
from moectl.shared.place_trace import base_suffix, dense_suffix, place_trace
from moectl.shared.stores import check_store, foresight_for
from moectl.shared.terminal.progress import Phases, progress_bar
from moectl.shared.text import read_text
from moectl.shared.trace_source import OpenedTrace, TraceSource, open_source
from moectl.show.grounds import simulated as grounds_of
from profilers.compare.bench import BenchSetting, BenchText
from profilers.compare.quality import read
from profilers.text.corpus import data_digest
from profilers.workers.choose import replaying
from profilers.workers.workers import ATTEMPTS, Executor, Lost, Workers
from runtime.control import sizes
from runtime.model.open import MoeModel
from runtime.policies.presets import Preset, Scope
from runtime.replay.settings import Outcome, oracles
from runtime.replay.settings import Setting as ReplaySetting
from runtime.replay.workload import Workload
from runtime.session.session import Session, Settings

NOT_MEASURED = "quality: not of a simulation; a live bench measures it"
_DISTANCE = 3  # layers ahead that a recorded trace predicts
BOUND = (
    "oracle: Belady with prefetching of what is really wanted, in the scope where that is faster"
)


def simulated(name: str, request: BenchRequest, phases: Phases, *, store: Path) -> Benched:
    """Replay every setting; resume where the same bench was stopped."""
    phases.begin("taking or recording a trace")
    torch.set_num_threads(request.threads)
    check_store(store)
    source, shortfall = _source(name, request, store=store)
    opened = open_source(source)
    if opened.model_id:
        request = request.of_model(store, opened.model_id)
    phases.begin("placing it on the machine")
    opened, target, costs = place_trace(
        opened, request.machine or DEFAULT_MACHINE, store, base=request.base, dense=request.dense
    )
    workloads = {
        link: _workload(opened, target, costs, request, link=link) for link in request.link_names
    }
    artefacts = artefact_runs(store, opened.model_id) if opened.model_id else {}
    job = _job(opened, target, costs, request, artefacts)
    ledger = Ledger(store, job, model_id=opened.model_id)
    settings = request.settings()
    rows = {} if request.again else ledger.finished()
    missing = [setting for setting in settings if setting not in rows]
    known = [note for workload in workloads.values() for note in workload.assumed]
    assumed: dict[BenchSetting, list[str]] = {}
    phases.begin(f"simulating {len(settings)} settings")
    with (
        replaying(request.executor, request.jobs) as executor,
        progress_bar("simulating", unit="settings") as bar,
    ):
        bar(len(rows), len(settings))

        def on_replayed(done: Replayed) -> None:
            rows[done.setting] = _row(done, ledger)
            assumed[done.setting] = done.assumed
            bar(len(rows), len(settings))

        work = Replays(workloads, request.stored, devices=request.devices)
        lost = _replay(work, missing, executor, on_replayed)
    if lost:
        raise Partly(_what_is_lost(lost, len(settings)))
    assumptions = dict.fromkeys(
        [*known, *(note for setting in missing for note in assumed[setting])]
    )
    short = [f"recorded: only {shortfall}"] * bool(shortfall)
    notes = (BOUND, NOT_MEASURED, *short, *(f"assumed: {note}" for note in assumptions))
    conditions = _conditions(opened, target, request, len(settings) - len(missing))
    shape = opened.model.shape
    grounds = grounds_of(target.name, shape.nbytes)
    ordered = [rows[setting] for setting in settings]
    return Benched(ordered, shape, grounds, request.asked, conditions, notes, job.digest)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one setting: an outcome, or in `why` the reason that there is none."""

    setting: BenchSetting
    outcome: Outcome | None
    why: str
    assumed: list[str]
    started_at: datetime
    seconds: float


class Replays:
    """The task of a worker process: replays a setting on the workload of its link."""

    def __init__(
        self, workloads: Mapping[str, Workload], stored: Mapping[str, Preset], *, devices: int
    ) -> None:
        self._workloads = workloads
        self._stored = stored
        self._devices = devices
        self._of_trace = {link: list(workload.assumed) for link, workload in workloads.items()}

    def __call__(self, setting: BenchSetting) -> Replayed:
        workload = self._workloads[setting.link]
        started_at = utc_now()
        begin_s = perf_counter()
        workload.assumed[:] = self._of_trace[
            setting.link
        ]  # drops assumptions of earlier settings; the list is shared
        outcome = None
        why = ""
        try:
            outcome = _outcome(workload, setting, self._stored, devices=self._devices)
        except Problem as problem:
            why = str(problem)
        return Replayed(
            setting, outcome, why, list(workload.assumed), started_at, perf_counter() - begin_s
        )


def _replay(
    work: Replays,
    settings: list[BenchSetting],
    executor: Executor,
    on_replayed: Callable[[Replayed], None],
) -> Lost:
    """Replay every setting; return the errors of those that failed, by setting."""
    with Workers(work, executor, on_replayed) as workers:
        for setting in settings:
            workers.submit(setting, setting)
        return workers.persist(lambda setting: workers.submit(setting, setting))


def _what_is_lost(lost: Lost, total: int) -> str:
    listed = ", ".join(" ".join((setting.preset, setting.budget, setting.link)) for setting in lost)
    reason = str(next(iter(lost.values()))).strip().splitlines()[-1]
    return (
        f"{len(lost)} of {total} settings were tried {ATTEMPTS} times and could not be replayed: "
        f"{listed}; all others are kept, and the same command tries these again. Of the first: "
        f"{reason}"
    )


def _row(done: Replayed, ledger: Ledger) -> BenchRow:
    if done.outcome is None:
        return BenchRow(**asdict(done.setting), mode=SIMULATED, why=done.why)
    row = simulated_row(done.setting, done.outcome)
    by_layer = done.outcome.by_layer
    return ledger.write(
        row, by_layer=by_layer, started_at=done.started_at, seconds=done.seconds, beside={}
    )


def _outcome(
    workload: Workload, setting: BenchSetting, stored: Mapping[str, Preset], *, devices: int
) -> Outcome:
    """Replay a setting; for the oracle, the faster of its two scopes."""
    room = {"budget": setting.budget, "devices": devices}
    if setting.preset != ORACLE:
        preset = stored.get(setting.preset, setting.preset)
        return workload.run(ReplaySetting(setting.preset, preset, **room))
    bounds = [oracles(ReplaySetting(ORACLE, scope=str(scope), **room))[1] for scope in Scope]
    return min(map(workload.run, bounds), key=lambda outcome: outcome.times["tpot_ms"] or 0.0)


def _workload(
    opened: OpenedTrace, target: Machine, costs: Costs | None, request: BenchRequest, *, link: str
) -> Workload:
    """The trace on the machine, with the machine's own link or one of another rate."""
    if link != AUTO:
        bandwidth, latency_s = sizes.rate(link)
        target = replace(target, link_gbps=bandwidth / 1e9, link_latency_s=latency_s)
        costs = costs and replace(
            costs,
            load_s=opened.model.shape.expert_nbytes / bandwidth,
            load_latency_s=costs.load_latency_s + latency_s,
        )
    return Workload(
        opened.trace,
        opened.model,
        target,
        artefacts=opened.artefacts,
        costs=costs,
        dense=request.dense,
        clients=request.served,
    )


def _source(name: str, request: BenchRequest, *, store: Path) -> tuple[TraceSource, str]:
    """The trace file of the request, else the newest trace of this model in the store, else one
    recorded now; and by how much less text than was asked for it was recorded on."""
    if request.trace is not None:
        return TraceSource(request.trace, model=name, store=store), ""
    opened = open_quietly(name, device=request.device)
    run = _stored_trace(store, opened)
    shortfall = ""
    if run is None:
        text = read_text(
            opened,
            request.data,
            length=request.length,
            num_tokens=request.tokens,
            seed=request.seed,
        )
        shortfall = text.shortfall
        run = record_trace(name, opened, text, store, data=request.data, seed=request.seed)
    return TraceSource(run=run, store=store), shortfall


def _stored_trace(path: Path, opened: MoeModel) -> int | None:
    if not path.exists():
        return None
    with Store.open(path, read_only=True) as store:
        run = store.latest_run(model_id=opened.fingerprint[:16], table="traces")
    return run.run_id if run else None


def record_trace(
    name: str, opened: MoeModel, text: BenchText, path: Path, *, data: str, seed: int
) -> int:
    """Record the routing of a text, with predictions, into the store; return its run."""
    started_at = utc_now()
    begin_s = perf_counter()
    info = model_info(name, opened)
    trace = _traced(opened, text, path)
    run = RunInfo(
        command="trace",
        model_id=info.model_id,
        started_at=started_at,
        seconds=perf_counter() - begin_s,
        data=data,
        data_digest=data_digest(text.sequences),
        tokens=text.num_tokens,
        seed=seed,
        parameters={
            "length": len(text.sequences[0]),
            "prefill": text.prefill,
            "tokens_asked": text.asked,
        },
    )
    return add_run(path, run, {"traces": to_table(trace)}, model=info)


def _traced(opened: MoeModel, text: BenchText, store: Path) -> Trace:
    with (
        Session(opened, Settings()) as session,
        progress_bar("recording", unit="tokens") as advance,
    ):
        recorder = session.record()
        ahead = foresight_for(opened, min(_DISTANCE, opened.shape.num_layers), store=store)
        session.watcher.see_predictions(ahead.distance, ahead.predictor)
        read(
            session,
            text.sequences,
            prefill=text.prefill,
            progress=lambda done: advance(done, text.num_decoded),
        )
        return recorder.trace()


def _job(
    opened: OpenedTrace,
    target: Machine,
    costs: Costs | None,
    request: BenchRequest,
    artefacts: dict[str, int],
) -> BenchJob:
    conditions = {
        "mode": SIMULATED,
        "model": {name: value for name, value in asdict(opened.model).items() if name != "assumed"},
        "machine": {name: str(value) for name, value in asdict(target).items()},
        "costs": asdict(costs) if costs else None,
        "artefacts": artefacts,
        "tuned": request.tuned,
        "base": request.base,
        "dense": request.dense,
        "devices": request.devices,
    }
    if request.served:
        conditions["clients"] = asdict(request.served)
    num_tokens = len(opened.trace) // opened.trace.num_layers
    return BenchJob(opened.name, _digest(opened.trace), num_tokens, request.seed, conditions)


def _digest(trace: Trace) -> str:
    digest = hashlib.sha256()
    for name, column in trace.columns().items():
        digest.update(name.encode())
        digest.update(column.tobytes())
    return digest.hexdigest()


def _conditions(opened: OpenedTrace, target: Machine, request: BenchRequest, taken_up: int) -> str:
    spread = f", experts on {request.devices} devices" * (request.devices > 1)
    resumed = f"; {taken_up} settings were replayed by an earlier run" if taken_up else ""
    num_tokens = len(opened.trace) // opened.trace.num_layers
    crowd = f" to {request.served.shown}" if request.served else ""
    few_bits = base_suffix(request.base) + dense_suffix(request.dense)
    return (
        f"{opened.name}: {num_tokens:,} tokens of {opened.model.name}{few_bits} on "
        f"{target.name}{crowd}; one replay of each setting from an empty cache, the same each "
        f"time{spread}{resumed}"
    )

"""The trace that a command replays: from a Parquet file, from a run of the store, or synthetic; and
its model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.errors import BadUsage
from artifacts.modelshapes.known import ModelShape, guessed, model_shape, unsized
from artifacts.shape import Shape
from artifacts.store.expert_maps import latest_maps, stored_maps
from artifacts.store.store import Store
from artifacts.tables import Results
from artifacts.traces.parquet import from_table, read_parquet
from artifacts.traces.synthetic import generate, parse_dials
from artifacts.traces.trace import Trace
from moectl.bundled import bundled_trace, demo_model
from moectl.shared.timed_machine import timed_machine
from runtime.policies.base import Artefacts
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload
from runtime.session.artefacts import load_artefacts

_SYNTHETIC_MODEL = "olmoe-1b-7b"
# of an expert's bytes at most: biases, alignment in a slot, and scales of blocks that are cut off
_PADDING = 0.1


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Trace as the user named it: at most one of `trace`, `run` and `synthetic`, and facts about
    the model that the trace does not state.

    Raises BadUsage for more than one of them, and for a layer without experts.
    """

    trace: Path | None = None
    run: int | None = None
    synthetic: str | None = None
    num_experts: int | None = None
    model: str | None = None
    store: Path = Path("moe.duckdb")
    with_maps: bool = False  # take expert maps from the store also for a trace in a file

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.trace, self.run, self.synthetic)) > 1:
            raise BadUsage("give one of --trace FILE, --run ID and --synthetic SPEC")
        if self.num_experts is not None and self.num_experts < 1:
            raise BadUsage(f"a layer has at least one expert, not --num-experts {self.num_experts}")


@dataclass(frozen=True, slots=True)
class OpenedTrace:
    """A trace, its model, and the store's artefacts of that model; `model_id` and `run`, the
    store's run that wrote the trace, are None for a trace from elsewhere."""

    name: str
    trace: Trace
    model: ModelShape
    artefacts: Artefacts
    model_id: str | None = None
    run: int | None = None


def open_source(source: TraceSource) -> OpenedTrace:
    """Read or generate the trace. Raises BadUsage, BadInput or Incompatible."""
    if source.synthetic is not None:
        return _synthetic(source)
    if source.trace is not None:
        return _from_file(source)
    if source.run is None and not source.store.exists():
        raise BadUsage(
            f"give --trace FILE, --run ID or --synthetic SPEC; there is no store {source.store} "
            "to take a trace from: `moectl profile --trace` makes one"
        )
    return _from_store(source)


def simulate(
    trace: str | Path,
    settings: Sequence[Setting],
    *,
    machine: str = "a100-pcie4",
    model: str | None = None,
) -> Results[Outcome]:
    """Replay a trace, a Parquet file or the name of a bundled one, by each setting in virtual time,
    as `moectl simulate` does. `model`: whose shape it has, where the trace does not say. Raises a
    Problem."""
    opened = open_source(TraceSource(Path(trace), model=model))
    workload = Workload(opened.trace, opened.model, timed_machine(machine))
    return Results(workload.run(setting) for setting in settings)


def _from_file(source: TraceSource) -> OpenedTrace:
    bundled = bundled_trace(source.trace)
    if bundled and source.model is None and source.num_experts is None:
        source = replace(source, model=str(source.trace))
    model = _named(source)
    num_experts = source.num_experts or (model.shape.num_experts if model else None)
    trace = read_parquet(bundled or source.trace, num_experts=num_experts)
    if model is None:
        model = unsized(trace.num_layers, num_experts or _recorded_experts(trace), trace.top_k)
    return OpenedTrace(str(source.trace), trace, model, _maps(source, trace, model.shape))


def _maps(source: TraceSource, trace: Trace, shape: Shape) -> Artefacts:
    """Return the store's newest expert maps if their sizes fit: a file does not say which model it
    is of."""
    if not source.with_maps or trace.iteration is None or not source.store.exists():
        return Artefacts()
    with Store.open(source.store, read_only=True) as store:
        run = latest_maps(store)
        if run is None:
            return Artefacts()
        maps = stored_maps(store, run_id=run.run_id)
    sizes = (shape.num_layers, shape.num_experts, trace.embeddings.shape[1])
    fits = (maps.num_layers, maps.num_experts, maps.hidden) == sizes
    return Artefacts(maps=maps, maps_run=run.run_id) if fits else Artefacts()


def _from_store(source: TraceSource) -> OpenedTrace:
    with Store.open(source.store, read_only=True) as store:
        lacks = "trace: `moectl profile --trace` records one"
        run = store.run_with("traces", source.run, lacks=lacks)
        info = next(info for info in store.models() if info.model_id == run.info.model_id)
        trace = from_table(store.read("traces", run.run_id), num_experts=info.shape.num_experts)
        artefacts = load_artefacts(store, info.model_id, info.shape)
    model = _named(source) or _with_config(info.name, guessed(info.shape))
    return OpenedTrace(
        f"run {run.run_id} of {source.store}", trace, model, artefacts, info.model_id, run.run_id
    )


def _with_config(name: str, stored: ModelShape) -> ModelShape:
    """Return the shape that the profiled folder's config gives, if the folder still holds that
    model, with the bytes that experts have as they are stored."""
    if (Path(name) / "config.json").is_file():
        configured = model_shape(name)
        shape = stored.shape
        share = shape.expert_nbytes / configured.shape.expert_nbytes
        if configured.shape == shape:
            return configured
        if (
            replace(configured.shape, expert_nbytes=shape.expert_nbytes) == shape
            and abs(share - 1) < _PADDING
        ):
            return replace(configured, shape=shape, weight_nbytes=share * configured.weight_nbytes)
    return replace(stored, name=name)


def _synthetic(source: TraceSource) -> OpenedTrace:
    dials = parse_dials(source.synthetic)
    model = _named(source) or model_shape(_SYNTHETIC_MODEL)
    shape = model.shape
    if source.num_experts is not None:
        model = unsized(shape.num_layers, source.num_experts, min(shape.top_k, source.num_experts))
    return OpenedTrace(f"synthetic {dials}", generate(dials, model.shape), model, Artefacts())


def _named(source: TraceSource) -> ModelShape | None:
    """Return the model that the user named. Raises BadUsage when `--num-experts` contradicts it."""
    if source.model is None:
        return None
    model = model_shape(str(demo_model()) if source.model == "bundled" else source.model)
    if source.num_experts not in (None, model.shape.num_experts):
        raise BadUsage(
            f"{source.model} has {model.shape.num_experts} experts a layer, not "
            f"{source.num_experts}"
        )
    return model


def _recorded_experts(trace: Trace) -> int:
    """Return how many experts a layer has by the trace's probabilities. Raises BadUsage for a trace
    without them."""
    if trace.probabilities is None:
        raise BadUsage(
            "the trace does not say how many experts a layer has: give --num-experts or --model"
        )
    return trace.probabilities.shape[1]

"""Where a simulation's trace comes from: a Parquet file, a run in the store, or a synthetic one; and whose it is."""

from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.errors import BadUsage, Incompatible
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import HERE, Machine, machine
from artifacts.hardware.profile import REMEDY
from artifacts.modelshapes.known import ModelShape, guessed, model_shape, unsized
from artifacts.shape import FULL_BITS, Shape
from artifacts.store.expert_maps import latest_maps, stored_maps
from artifacts.store.hardware_profiles import profile_for
from artifacts.store.predictors import load_predictors
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from artifacts.traces.parquet import from_table, read_parquet
from artifacts.traces.synthetic import generate, parse_dials
from artifacts.traces.trace import Trace
from moectl.bundled import demo_model
from profilers.routing.observe import Foresight
from runtime.engine.predictors import Predictor
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.replay import from_trace as derived
from runtime.replay.measured_machine import costs_of, machine_of
from runtime.session.artefacts import load_artefacts

_SYNTHETIC_MODEL = "olmoe-1b-7b"


@dataclass(frozen=True, slots=True)
class TraceSource:
    """What a user said: at most one of `trace`, `run` and `synthetic`, and of the model what the trace cannot tell."""

    trace: Path | None = None
    run: int | None = None
    synthetic: str | None = None
    num_experts: int | None = None
    model: str | None = None
    store: Path = Path("moe.duckdb")
    with_maps: bool = False  # take expert maps from the store for a trace that is not in it

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.trace, self.run, self.synthetic)) > 1:
            raise BadUsage("give one of --trace FILE, --run ID and --synthetic SPEC")
        if self.num_experts is not None and self.num_experts < 1:
            raise BadUsage(f"a layer has at least one expert, not --num-experts {self.num_experts}")


@dataclass(frozen=True, slots=True)
class OpenedTrace:
    """A trace, its model, and what the store knows of that model. `model_id` is None where the store did not tell."""

    name: str
    trace: Trace
    model: ModelShape
    artefacts: Artefacts
    model_id: str | None = None


def open_source(source: TraceSource) -> OpenedTrace:
    """Raises BadUsage, BadInput or Incompatible."""
    if source.synthetic is not None:
        return _synthetic(source)
    if source.trace is not None:
        return _from_file(source)
    if source.run is None and not source.store.exists():
        raise BadUsage(
            f"give --trace FILE, --run ID or --synthetic SPEC; there is no store {source.store} to take a trace from: "
            "`moectl profile --trace` makes one"
        )
    return _from_store(source)


def on_base(opened: OpenedTrace, bits: int) -> OpenedTrace:
    """The same with experts that are their replicas of so many bits: the store's, else such as are usual."""
    if bits == FULL_BITS:
        return opened
    model, replicas = opened.model, opened.artefacts.replicas
    notes = () if replicas else ("the base: replicas as large as in groups of 128, losses as of a small model",)
    based = (replicas or derived.replicas(opened.trace, model)).on_base(bits)
    nbytes = based.nbytes[FULL_BITS]
    return replace(
        opened,
        model=replace(
            model,
            shape=replace(model.shape, expert_nbytes=nbytes, num_neurons=0, neuron_nbytes=1),
            weight_nbytes=model.weight_nbytes * nbytes / model.shape.expert_nbytes,
            assumed=(*model.assumed, *notes),
        ),
        artefacts=replace(opened.artefacts, replicas=based),
    )


def _from_file(source: TraceSource) -> OpenedTrace:
    known = _named(source)
    num_experts = source.num_experts or (known.shape.num_experts if known else None)
    trace = read_parquet(source.trace, num_experts=num_experts)
    if known is None:
        if num_experts is None:
            num_experts = _told_by(trace)
        known = unsized(trace.num_layers, num_experts, trace.top_k)
    return OpenedTrace(str(source.trace), trace, known, _maps(source, trace, known.shape))


def _maps(source: TraceSource, trace: Trace, shape: Shape) -> Artefacts:
    """The store's newest expert maps, if they fit: a file does not say of which model it is."""
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
        run = _find(store, source.run)
        info = next(model for model in store.models() if model.model_id == run.info.model_id)
        trace = from_table(store.read("traces", run.run_id), num_experts=info.shape.num_experts)
        artefacts = load_artefacts(store, info.model_id, info.shape)
    known = _named(source) or _with_config(info.name, guessed(info.shape))
    return OpenedTrace(f"run {run.run_id} of {source.store}", trace, known, artefacts, info.model_id)


def _find(store: Store, run_id: int | None) -> StoredRun:
    """The run asked for, or the newest with a trace."""
    candidates = store.runs() if run_id is None else [store.run(run_id)]
    found = [run for run in candidates if "traces" in run.contents]
    if not found:
        where = store.path if run_id is None else f"run {run_id} of {store.path}"
        raise Incompatible(f"{where} holds no trace: `moectl profile --trace` records one")
    return found[-1]


def _with_config(name: str, known: ModelShape) -> ModelShape:
    """The shape in the folder from which the model was profiled, if it is still there and still that model."""
    if not (Path(name) / "config.json").is_file():
        return replace(known, name=name)
    found = model_shape(name)
    return found if found.shape == known.shape else replace(known, name=name)


def _synthetic(source: TraceSource) -> OpenedTrace:
    dials = parse_dials(source.synthetic)
    known = _named(source) or model_shape(_SYNTHETIC_MODEL)
    shape = known.shape
    if source.num_experts is not None:
        known = unsized(shape.num_layers, source.num_experts, min(shape.top_k, source.num_experts))
    trace = generate(dials, known.shape)
    return OpenedTrace(f"synthetic {dials}", trace, known, Artefacts())


def _named(source: TraceSource) -> ModelShape | None:
    """The model that the user named, which must have as many experts as they said."""
    if source.model is None:
        return None
    known = model_shape(str(demo_model()) if source.model == "bundled" else source.model)
    if source.num_experts not in (None, known.shape.num_experts):
        raise BadUsage(f"{source.model} has {known.shape.num_experts} experts a layer, not {source.num_experts}")
    return known


def _told_by(trace: Trace) -> int:
    if trace.probabilities is None:
        raise BadUsage("the trace does not say how many experts a layer has: give --num-experts or --model")
    return trace.probabilities.shape[1]


def foresight(opened: MoeModel, distance: int, *, store: Path) -> Foresight:
    """What a trace is to say of the layers ahead: the store's predictors too, if it has some for this model."""
    if distance > opened.shape.num_layers:
        raise BadUsage(f"the distance must be 1 to {opened.shape.num_layers}, the model's MoE layers, not {distance}")
    with Store.open(store) as held:
        known = load_predictors(held, opened.fingerprint[:16], opened.shape)
    reach = min(distance, known.distance) if known else 0
    return Foresight(distance, Predictor(known, reach, opened.model.device) if known else None)


def placed(opened: OpenedTrace, name: str, path: Path, *, base: int) -> tuple[OpenedTrace, Machine, Costs | None]:
    """What is replayed, on its base and on a named machine, or `here`: on this one, with what the store's hardware
    profile says that the model costs on it."""
    based, shape = on_base(opened, base), opened.model.shape
    if name != HERE:
        return based, machine(name), None
    if not path.exists():
        raise Incompatible(f"there is no store {path} with a hardware profile: {REMEDY}, or name a machine")
    with Store.open(path, read_only=True) as store:
        profile = profile_for(store, shape, name=opened.model.name)
    costs = costs_of(profile, shape).on_base(base, based.model.shape.expert_nbytes / shape.expert_nbytes)
    return based, machine_of(profile, shape), costs


def of_base(bits: int) -> str:
    """What to add to a size where experts are not the checkpoint's."""
    return "" if bits == FULL_BITS else f", replicas of {bits} bits"

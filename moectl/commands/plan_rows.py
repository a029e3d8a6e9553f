"""A plan from a config alone: what fits into a GPU's memory, and how fast each preset would then be, on synthetic
routers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from artifacts.errors import BadUsage, OutOfResources, Problem
from artifacts.hardware.machines import Machine, machine
from artifacts.modelshapes.known import ModelShape, model_shape
from artifacts.modelshapes.memory import BackboneMemory, backbone_memory, backbone_of
from artifacts.traces.synthetic import Dials, generate
from moectl.show.render import human_bytes
from runtime.control import sizes
from runtime.control.counters import AT_BITS, hit_rate
from runtime.policies.presets import presets
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload

RESERVE_NBYTES = 1 << 30  # the driver's own, activations and buffers
# What routers may be like: what a token selects is spread evenly and changes at once, as of trained models, or is
# concentrated and stays. Between the ends lies what is reported of published models.
ROUTERS = {
    "even": Dials(skew=0.4, locality=0.1, predictability=0.5, tokens=512, requests=4),
    "usual": Dials(tokens=512, requests=4),
    "skewed": Dials(skew=1.2, locality=0.6, predictability=0.9, tokens=512, requests=4),
}
USUAL = "usual"
_MOST_LAYERS = 8  # that are simulated: those of a synthetic trace are alike


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`vram` as bytes are written; `context` tokens are held in the attention cache."""

    model: str
    vram: str
    machine: str
    context: int = 4096

    def __post_init__(self) -> None:
        machine(self.machine)
        if sizes.nbytes(self.vram) < 1:
            raise BadUsage(f"--vram {self.vram} is no memory: write bytes, as 24GB")
        if self.context < 1:
            raise BadUsage(f"--context {self.context}: a context is one token or more")


@dataclass(frozen=True, slots=True)
class Memory:
    """Who has how many bytes of the GPU. `experts_nbytes` are left for experts, of `all_experts_nbytes`."""

    vram_nbytes: int
    weights_nbytes: int
    cache_nbytes: int
    reserve_nbytes: int
    experts_nbytes: int
    all_experts_nbytes: int

    @property
    def share(self) -> float:
        """Of all experts that fit, at most 1."""
        return min(1.0, self.experts_nbytes / self.all_experts_nbytes)


@dataclass(frozen=True, slots=True)
class Expected:
    """A preset on synthetic routers: times with the usual ones, tokens a second from the worst to the best of all.

    `alters` says by what the output is not the full model's, empty where it is. `moved_nbytes` a token.
    """

    preset: str
    tokens_per_s: float | None = None
    least: float | None = None
    most: float | None = None
    tpot_ms: float | None = None
    hit_rate: float | None = None
    moved_nbytes: int | None = None
    alters: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """`rows` by speed; those that could not be tried, with the reason, last."""

    request: PlanRequest
    model: ModelShape
    machine: Machine
    memory: Memory
    rows: list[Expected]
    simulated_layers: int
    assumed: tuple[str, ...]

    @property
    def exact(self) -> Expected | None:
        """The fastest that alters nothing."""
        return next((row for row in self.rows if not row.why and not row.alters), None)

    @property
    def fastest(self) -> Expected | None:
        return next((row for row in self.rows if not row.why), None)


def plan(request: PlanRequest, progress: Callable[[int, int], None] = lambda done, total: None) -> DeploymentPlan:
    """Raises BadUsage or BadInput for a model that is not known, OutOfResources when not even one expert a layer
    fits."""
    model, found = model_shape(request.model), machine(request.machine)
    memory = divided(request, model, backbone_memory(model, backbone_of(request.model)))
    few = _few_layers(model)
    rows, assumed = _expected(few, found, memory, model.shape.num_layers / few.shape.num_layers, progress)
    return DeploymentPlan(request, model, found, memory, rows, few.shape.num_layers, (*model.assumed, *assumed))


def divided(request: PlanRequest, model: ModelShape, needs: BackboneMemory) -> Memory:
    """What is left for experts. Raises OutOfResources, saying how much would do."""
    vram, cache = sizes.nbytes(request.vram), needs.cache_nbytes * request.context
    taken = needs.weights_nbytes + cache + RESERVE_NBYTES
    shape = model.shape
    least = taken + shape.num_layers * shape.expert_nbytes
    if vram < least:
        raise OutOfResources(
            f"{model.name} does not fit into {request.vram}: {human_bytes(needs.weights_nbytes)} of weights besides "
            f"experts, {human_bytes(cache)} of attention cache for {request.context:,} tokens, "
            f"{human_bytes(RESERVE_NBYTES)} in reserve and one expert a layer take {human_bytes(least)}"
        )
    return Memory(vram, needs.weights_nbytes, cache, RESERVE_NBYTES, vram - taken, shape.nbytes)


def _few_layers(model: ModelShape) -> ModelShape:
    """The model with as many layers as are simulated, and their share of its head."""
    few = min(_MOST_LAYERS, model.shape.num_layers)
    vocabulary = round(model.vocabulary * few / model.shape.num_layers)
    return replace(model, shape=replace(model.shape, num_layers=few), vocabulary=vocabulary)


def _expected(
    model: ModelShape, found: Machine, memory: Memory, scale: float, progress: Callable[[int, int], None]
) -> tuple[list[Expected], tuple[str, ...]]:
    """Where everything fits, of what holds everything; else of what does not."""
    workloads = {name: Workload(generate(dials, model.shape), model, found) for name, dials in ROUTERS.items()}
    names = [name for name, preset in presets().items() if (memory.share == 1) == (preset.budget == "100%")]
    rows = []
    for number, preset in enumerate(names):
        progress(number, len(names))
        rows.append(_tried(preset, workloads, memory, scale))
    rows.sort(key=lambda row: (row.tokens_per_s is None, -(row.tokens_per_s or 0)))
    return rows, tuple(workloads[USUAL].assumed)


def _tried(preset: str, workloads: dict[str, Workload], memory: Memory, scale: float) -> Expected:
    setting = Setting(preset, preset, budget=f"{100 * memory.share:.6f}%")
    try:
        outcomes = {name: workload.run(setting) for name, workload in workloads.items()}
    except Problem as problem:
        return Expected(preset, why=str(problem))
    speeds = [1e3 / (outcome.times["tpot_ms"] * scale) for outcome in outcomes.values()]
    usual = outcomes[USUAL]
    moved = usual.counters["demand_bytes"] + usual.counters["prefetch_bytes"]
    return Expected(
        preset=preset,
        tokens_per_s=1e3 / (usual.times["tpot_ms"] * scale),
        least=min(speeds),
        most=max(speeds),
        tpot_ms=usual.times["tpot_ms"] * scale,
        hit_rate=hit_rate(usual.counters),
        moved_nbytes=round(moved * scale / ROUTERS[USUAL].tokens),
        alters=_alters(usual),
    )


def _alters(outcome: Outcome) -> str:
    counters = outcome.counters
    found = {
        "few bits": sum(counters[name] for name in AT_BITS.values()),
        "other experts": counters["replaced_ranks"],
        "experts left out": counters["dropped_ranks"],
    }
    return ", ".join(what for what, count in found.items() if count)

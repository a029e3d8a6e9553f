"""A plan from a config alone: what fits into a GPU's memory, and how fast each preset is on synthetic routers."""

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

RESERVE_NBYTES = 1 << 30  # for the driver, activations and buffers
# Kinds of routers. Even ones spread tokens over all experts and change with every token; skewed ones concentrate on few
# experts and keep them. Reports on published models lie in between.
ROUTERS = {
    "even": Dials(skew=0.4, locality=0.1, predictability=0.5, tokens=512, requests=4),
    "usual": Dials(tokens=512, requests=4),
    "skewed": Dials(skew=1.2, locality=0.6, predictability=0.9, tokens=512, requests=4),
}
USUAL = "usual"
_MOST_LAYERS = 8  # simulated layers: the layers of a synthetic trace are alike


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`vram` is written as bytes are, as 24GB; the attention cache holds `context` tokens."""

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
    """How the bytes of the GPU are divided. `experts_nbytes` are left for experts, of `all_experts_nbytes`."""

    vram_nbytes: int
    weights_nbytes: int
    cache_nbytes: int
    reserve_nbytes: int
    experts_nbytes: int
    all_experts_nbytes: int

    @property
    def share(self) -> float:
        """The share of all experts that fits, at most 1."""
        return min(1.0, self.experts_nbytes / self.all_experts_nbytes)


@dataclass(frozen=True, slots=True)
class Expected:
    """A preset on synthetic routers: times with the usual ones, tokens per second from the slowest to the fastest.

    `alters` names what makes the output differ from the full model's, empty where nothing does. `moved_nbytes` is per
    token.
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
    """`rows` are sorted by speed; presets that could not be tried come last, with the reason."""

    request: PlanRequest
    model: ModelShape
    machine: Machine
    memory: Memory
    rows: list[Expected]
    simulated_layers: int
    assumed: tuple[str, ...]

    @property
    def exact(self) -> Expected | None:
        """The fastest preset that alters nothing."""
        return next((row for row in self.rows if not row.why and not row.alters), None)

    @property
    def fastest(self) -> Expected | None:
        return next((row for row in self.rows if not row.why), None)


def plan_deployment(
    request: PlanRequest, progress: Callable[[int, int], None] = lambda done, total: None
) -> DeploymentPlan:
    """Divide the memory, and replay every preset on synthetic routers.

    Raises BadUsage or BadInput for an unknown model, OutOfResources when less than one expert per layer fits.
    """
    model, chosen = model_shape(request.model), machine(request.machine)
    memory = divided(request, model, backbone_memory(model, backbone_of(request.model)))
    few = _few_layers(model)
    rows, assumed = _expected(few, chosen, memory, model.shape.num_layers / few.shape.num_layers, progress)
    return DeploymentPlan(request, model, chosen, memory, rows, few.shape.num_layers, (*model.assumed, *assumed))


def divided(request: PlanRequest, model: ModelShape, needs: BackboneMemory) -> Memory:
    """Return what is left for experts. Raises OutOfResources, naming the memory that would do."""
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
    """Return the model with only the simulated layers, and their share of its head."""
    few = min(_MOST_LAYERS, model.shape.num_layers)
    vocabulary = round(model.vocabulary * few / model.shape.num_layers)
    return replace(model, shape=replace(model.shape, num_layers=few), vocabulary=vocabulary)


def _expected(
    model: ModelShape, chosen: Machine, memory: Memory, scale: float, progress: Callable[[int, int], None]
) -> tuple[list[Expected], tuple[str, ...]]:
    """Replay the presets that hold all experts if all fit, else those that do not."""
    workloads = {name: Workload(generate(dials, model.shape), model, chosen) for name, dials in ROUTERS.items()}
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
    changes = {
        "few bits": sum(counters[name] for name in AT_BITS.values()),
        "other experts": counters["replaced_ranks"],
        "experts left out": counters["dropped_ranks"],
    }
    return ", ".join(what for what, count in changes.items() if count)

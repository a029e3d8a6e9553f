"""Simulation of each preset of a plan: replays on synthetic routers, which take most of a
minute."""

from collections.abc import Callable
from dataclasses import replace

from artifacts.errors import BadUsage, Problem
from artifacts.modelshapes.known import ModelShape
from artifacts.traces.synthetic import Dials, generate
from moectl.commands.start.plan.deployment import DeploymentPlan, Expected, requests_of
from moectl.commands.start.plan.fitting import Memory
from runtime.control.counters import AT_BITS, hit_rate
from runtime.policies import build
from runtime.policies.presets import Preset, presets
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload

# Kinds of routers. Even ones spread tokens over all experts and change with every token; skewed
# ones concentrate on few experts and keep them. Reports on published models lie in between.
ROUTERS = {
    "even": Dials(skew=0.4, locality=0.1, predictability=0.5),
    "usual": Dials(),
    "skewed": Dials(skew=1.2, locality=0.6, predictability=0.9),
}
USUAL = "usual"
_MOST_LAYERS = 8  # simulated layers: the layers of a synthetic trace are alike


def simulated(
    deployment: DeploymentPlan, progress: Callable[[int, int], None] = lambda done, total: None
) -> DeploymentPlan:
    """The plan with every preset replayed on synthetic routers."""
    model = deployment.model
    few = _few_layers(deployment.model)
    scale = model.shape.num_layers / few.shape.num_layers
    rows, assumed = _expected(few, deployment, scale, progress)
    return replace(
        deployment,
        rows=rows,
        simulated_layers=few.shape.num_layers,
        assumed=(*deployment.assumed, *assumed),
    )


def _few_layers(model: ModelShape) -> ModelShape:
    """Return the model with only the simulated layers, and their share of its head."""
    few = min(_MOST_LAYERS, model.shape.num_layers)
    vocabulary = round(model.vocabulary * few / model.shape.num_layers)
    return replace(model, shape=replace(model.shape, num_layers=few), vocabulary=vocabulary)


def _expected(
    model: ModelShape,
    deployment: DeploymentPlan,
    scale: float,
    progress: Callable[[int, int], None],
) -> tuple[list[Expected], tuple[str, ...]]:
    workloads = _workloads(model, deployment)
    memory = deployment.memory
    chosen = _presets_for(memory)
    rows = []
    for number, (name, preset) in enumerate(chosen.items()):
        progress(number, len(chosen))
        needs = tuple(sorted(build(preset.texts()).requires))
        row = _tried(name, workloads, memory, scale)
        rows.append(replace(row, needs=needs, is_study=preset.is_study))
    rows.sort(key=lambda row: (row.tokens_per_s is None, -(row.tokens_per_s or 0)))
    return rows, tuple(workloads[USUAL].assumed)


def _presets_for(memory: Memory) -> dict[str, Preset]:
    """Return the presets that hold all experts if all fit, else those that do not."""
    return {
        name: preset
        for name, preset in presets().items()
        if (memory.share == 1) == (preset.budget == "100%")
    }


def _workloads(model: ModelShape, deployment: DeploymentPlan) -> dict[str, Workload]:
    """Return the requests by kind of routers. Raises BadUsage for a place without bandwidths."""
    machine = deployment.machine
    request = deployment.request
    if machine is None:
        raise BadUsage(
            "the bandwidths of this GPU are not known: name a machine that is like it by --machine"
        )
    dials = requests_of(request.num_clients)
    return {
        name: Workload(
            generate(replace(kind, **dials), model.shape),
            model,
            machine,
            dense=request.dense,
            clients=request.clients,
        )
        for name, kind in ROUTERS.items()
    }


def _tried(preset: str, workloads: dict[str, Workload], memory: Memory, scale: float) -> Expected:
    setting = Setting(preset, preset, budget=f"{100 * memory.share:.6f}%")
    try:
        outcomes = {name: workload.run(setting) for name, workload in workloads.items()}
    except Problem as problem:
        return Expected(preset, why=str(problem))
    speeds = [outcome.times["tokens_per_s"] / scale for outcome in outcomes.values()]
    usual = outcomes[USUAL]
    moved = usual.counters["demand_bytes"] + usual.counters["prefetch_bytes"]
    return Expected(
        preset=preset,
        tokens_per_s=usual.times["tokens_per_s"] / scale,
        least=min(speeds),
        most=max(speeds),
        tpot_ms=usual.times["tpot_ms"] * scale,
        hit_rate=hit_rate(usual.counters),
        moved_nbytes=round(moved * scale / workloads[USUAL].num_tokens),
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

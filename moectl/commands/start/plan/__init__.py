"""`moectl plan`: from a config alone, without weights: what fits, what to expect, what to do
next."""

from collections.abc import Iterator

from artifacts.quantisation.widths import TRELLIS_WIDTHS
from artifacts.traces.clients import clients_of
from moectl.bundled import as_named, demo_model
from moectl.commands.start.plan.advice import advice, assumptions, next_steps, record, verdict
from moectl.commands.start.plan.place import PlanPlace
from moectl.commands.start.plan.rows import DeploymentPlan, Expected, PlanRequest, plan_deployment
from moectl.commands.start.plan.shadows import replica_nbytes
from moectl.shared.progress import progress_bar
from moectl.shared.resuming import resumable
from moectl.show.grounds import compared
from moectl.show.render import (
    NumBytes,
    Sheet,
    cell_text,
    console,
    human_bytes,
    show_json,
    show_sheet,
)

_FIRST = {
    "entropy": "profile",
    "buddies": "build-buddies",
    "coactivated": "build-buddies",
    "replicas": "quantize",
    "predictors": "build-predictor",
    "maps": "build-maps",
    "splits": "split",
}  # the command that makes an artefact


def plan(
    model: str,
    *,
    vram: str | None,
    machine: str | None,
    context: int,
    dense: int | None = None,
    clients: int | None = None,
) -> DeploymentPlan:
    """Plan for a model by its name, or by a folder or file with its config, on a machine or in so
    much memory; without either, on the GPU of this machine. It serves one request at a time, or
    `clients`. Raises BadUsage, BadInput, OutOfResources."""
    place = PlanPlace.find(vram, machine)
    named = as_named(model) or str(demo_model())
    return plan_deployment(PlanRequest(named, place, context, dense, clients_of(clients)))


@resumable()
def simulate(deployment: DeploymentPlan) -> DeploymentPlan:
    """The plan with every preset replayed on synthetic routers, which takes most of a minute."""
    from moectl.commands.start.plan.simulation import simulated

    with progress_bar("simulating", unit="presets") as advance:
        return simulated(deployment, advance)


def show(deployment: DeploymentPlan) -> None:
    """Print what fits and a quick guess of the speed."""
    show_sheet(_memory(deployment))
    console().print(verdict(deployment), markup=False)
    if deployment.bounds is not None and not (deployment.is_toy and deployment.memory.share == 1):
        show_sheet(_bounds(deployment))
    if deployment.memory.share < 1:
        _show_shadows(deployment)


def _show_shadows(deployment: DeploymentPlan) -> None:
    """Print what fits with every expert resident, if anything does."""
    if deployment.shadows:
        show_sheet(_shadows(deployment))
        return
    least = replica_nbytes(deployment.model, TRELLIS_WIDTHS[0])
    room = deployment.memory.experts_nbytes
    if least < deployment.model.shape.expert_nbytes:
        taken = human_bytes(least * deployment.model.shape.num_keys)
        line = (
            f"every expert at {TRELLIS_WIDTHS[0]} bits would take {taken}, and "
            f"{human_bytes(room)} are left for experts"
        )
        console().print(line, markup=False)


def show_simulated(deployment: DeploymentPlan) -> None:
    """Print the presets that were replayed, if any were."""
    if not deployment.offered:
        return
    show_sheet(_speeds(deployment))
    for line in (*_first(deployment.offered), *_not_tried(deployment.rows)):
        console().print(line, markup=False)


def show_advice(deployment: DeploymentPlan) -> None:
    """Print what to do with it, and what it assumes."""
    steps = (f"next: {step}" for step in next_steps(deployment))
    for line in (
        *advice(deployment),
        *steps,
        *(f"assumed: {line}" for line in assumptions(deployment)),
    ):
        console().print(line, markup=False)


def show_record(deployment: DeploymentPlan) -> None:
    """Print one JSON object."""
    show_json(record(deployment))


def _memory(deployment: DeploymentPlan) -> Sheet:
    memory = deployment.memory
    shape = deployment.model.shape
    request = deployment.request
    kept = "own dtype" if request.dense is None else f"linear layers at {request.dense} bits"
    rows = [
        (f"weights besides routed experts, {kept}", NumBytes(memory.weights_nbytes)),
        (f"attention cache, {request.cached}", NumBytes(memory.cache_nbytes)),
        ("reserve: driver, activations, buffers", NumBytes(memory.reserve_nbytes)),
        (f"left for experts, {memory.share:.1%} of them", NumBytes(memory.experts_nbytes)),
        ("all routed experts, in host memory or on disk", NumBytes(memory.all_experts_nbytes)),
        ("the checkpoint's files", NumBytes(memory.files_nbytes)),
    ]
    note = (
        f"{shape.num_layers} layers of {shape.num_experts} experts, "
        f"{human_bytes(shape.expert_nbytes)} each, {shape.top_k} a token"
    )
    return Sheet(
        f"Memory: {deployment.model.name} in {request.place.shown}", ("what", "bytes"), rows, note
    )


def _bounds(deployment: DeploymentPlan) -> Sheet:
    """The quick guess, as ratios for a model too small for a data sheet."""
    bounds = deployment.bounds
    share = deployment.memory.share
    title = f"Quick guess for {deployment.machine.name}, unmeasured"
    resident = {
        "none: each is brought when it is wanted": bounds.none,
        f"{share:.1%}, wanted equally often": bounds.share,
    }
    speeds = (
        resident | {"every one that is wanted": bounds.all} if share < 1 else {"all": bounds.all}
    )
    if deployment.is_toy:
        rows = [(what, compared(bounds.all / speed)) for what, speed in speeds.items()]
        note = "by bytes over bandwidth; so small a model has no times on a data sheet, only ratios"
        return Sheet(title, ("experts in fast memory", "beside all of them"), rows, note)
    rows = [(what, _rounded(speed), _rounded(1e3 / speed)) for what, speed in speeds.items()]
    low = f"{cell_text(_rounded(bounds.none))} to " if share < 1 else "at most "
    title = f"{title}: {low}{cell_text(_rounded(bounds.all))} tokens/s"
    note = (
        f"by bytes over bandwidth, {deployment.request.shown_clients}, nothing prefetched; "
        "launches and host work, which make a run slower, are not counted; in fewer bits than "
        "the checkpoint's it may be faster"
    )
    return Sheet(title, ("experts in fast memory", "tokens/s", "ms/token"), rows, note)


def _shadows(deployment: DeploymentPlan) -> Sheet:
    """Every expert in few bits, and whole ones beside them."""
    has_speed = deployment.bounds is not None and not deployment.is_toy
    rows = [
        (
            f"{row.bits}",
            NumBytes(row.nbytes),
            f"{row.share:.1%}",
            *([_rounded(row.tokens_per_s)] if has_speed else []),
        )
        for row in deployment.shadows
    ]
    columns = (
        "bits of every expert",
        "bytes",
        "whole beside them",
        *(["tokens/s"] if has_speed else []),
    )
    note = (
        "predicted: nothing of this model was quantised or run. First moectl quantize --recipe "
        "trellis, then --preset shadow; no token waits for an expert, and where one is not whole "
        "its replica alters the output"
    )
    return Sheet(
        f"Every expert of {deployment.model.name} resident, in trellis codes", columns, rows, note
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _speeds(deployment: DeploymentPlan) -> Sheet:
    rows = deployment.offered
    title = f"Simulated for {deployment.machine.name}, unmeasured"
    note = f"{deployment.request.shown_clients}, on synthetic routers"
    if deployment.is_toy:
        plain = next((row for row in rows if row.preset == "on-demand"), rows[0])
        columns = ("preset", f"beside {plain.preset}", "hit rate", "output altered by")
        cells = [
            (row.preset, compared(row.tpot_ms / plain.tpot_ms), row.hit_rate, row.alters or "-")
            for row in rows
        ]
        return Sheet(title, columns, cells, note)
    columns = ("preset", "tokens/s", "range", "hit rate", "output altered by")
    cells = [
        (row.preset, row.tokens_per_s, _range(row), row.hit_rate, row.alters or "-") for row in rows
    ]
    return Sheet(title, columns, cells, f"{note}; range: over three kinds of them")


def _range(row: Expected) -> str:
    return f"{row.least:.3g} to {row.most:.3g}"


def _first(rows: list[Expected]) -> Iterator[str]:
    """Say which presets need a command first, by the command."""
    commands = {row.preset: dict.fromkeys(_FIRST[need] for need in row.needs) for row in rows}
    for wanted in dict.fromkeys(
        tuple(sorted(names, reverse=True)) for names in commands.values() if names
    ):
        named = ", ".join(preset for preset, names in commands.items() if set(names) == set(wanted))
        yield f"first {' and '.join(f'`moectl {name}`' for name in wanted)}, for {named}"


def _not_tried(rows: list[Expected]) -> Iterator[str]:
    untried = (
        (row.preset, row.why.partition(":")[0]) for row in rows if row.why and not row.is_study
    )
    return (f"not simulated: {preset}: {why}" for preset, why in untried)

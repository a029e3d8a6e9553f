"""A plan as tables, as sentences and as JSON values."""

from collections.abc import Iterator
from dataclasses import asdict

from artifacts.modelshapes.kv_cache import AUTO
from artifacts.modelshapes.repositories import REPOSITORIES
from artifacts.quantisation.widths import TRELLIS_WIDTHS
from moectl.bundled import is_bundled
from moectl.commands.start.plan.answer import PlanAnswer, command
from moectl.commands.start.plan.deployment import (
    DeploymentPlan,
    Expected,
    replica_nbytes,
    requests_of,
)
from moectl.commands.start.plan.fitting import Memory, PlanRequest, smallest_with
from moectl.commands.start.plan.needs import known_name
from moectl.show.grounds import compared
from moectl.show.render import (
    NumBytes,
    Sheet,
    cell_text,
    console,
    human_bytes,
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
    """Print the presets that were replayed, if any were; then what to do, and what the plan
    assumes."""
    if deployment.offered:
        show_sheet(_speeds(deployment))
        for line in (*_first(deployment.offered), *_not_tried(deployment.rows)):
            console().print(line, markup=False)
    steps = (f"next: {step}" for step in next_steps(deployment))
    for line in (
        *advice(deployment),
        *steps,
        *(f"assumed: {line}" for line in assumptions(deployment)),
    ):
        console().print(line, markup=False)


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
        *_apart(memory),
    ]
    note = (
        f"{shape.num_layers} layers of {shape.num_experts} experts, "
        f"{human_bytes(shape.expert_nbytes)} each, {shape.top_k} a token"
    )
    return Sheet(
        f"Memory: {deployment.model.name} in {request.place.shown}", ("what", "bytes"), rows, note
    )


def _apart(memory: Memory) -> list[tuple[str, NumBytes]]:
    """Return rows of what the files have that is not in memory."""
    parts = {
        "of them tables, read by row": memory.tables_nbytes,
        "of them layers that draft (MTP), not in memory": memory.drafting_nbytes,
    }
    return [(what, NumBytes(nbytes)) for what, nbytes in parts.items() if nbytes]


def _bounds(deployment: DeploymentPlan) -> Sheet:
    """The quick guess, as ratios for a model too small for a data sheet."""
    bounds = deployment.bounds
    share = deployment.memory.share
    title = f"Quick guess for {deployment.machine.name}, unmeasured"
    speeds = {"all": bounds.all}
    if share < 1:
        speeds = {
            "none: each is brought when it is wanted": bounds.none,
            f"{share:.1%}, wanted equally often": bounds.share,
            "every one that is wanted": bounds.all,
        }
    if deployment.is_toy:
        return _ratios(title, speeds, bounds.all)
    rows = [(what, _rounded(speed), _rounded(1e3 / speed)) for what, speed in speeds.items()]
    low = f"{cell_text(_rounded(bounds.none))} to " if share < 1 else "at most "
    title = f"{title}: {low}{cell_text(_rounded(bounds.all))} tokens/s"
    note = (
        f"by bytes over bandwidth, {deployment.request.shown_clients}, nothing prefetched; "
        "launches and host work, which make a run slower, are not counted; in fewer bits than "
        "the checkpoint's it may be faster"
    )
    return Sheet(title, ("experts in fast memory", "tokens/s", "ms/token"), rows, note)


def _ratios(title: str, speeds: dict[str, float], to: float) -> Sheet:
    rows = [(what, compared(to / speed)) for what, speed in speeds.items()]
    note = "by bytes over bandwidth; so small a model has no times on a data sheet, only ratios"
    return Sheet(title, ("experts in fast memory", "beside all of them"), rows, note)


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


def verdict(deployment: DeploymentPlan) -> str:
    """Say in a sentence whether it fits."""
    memory = deployment.memory
    name = deployment.model.name
    if memory.share == 1:
        return (
            f"It fits: {name} takes {human_bytes(memory.whole_nbytes)} and everything is resident."
        )
    return (
        f"It runs with {memory.share:.1%} of its experts resident; the others are brought from "
        f"host memory or disk. All of it takes {human_bytes(memory.whole_nbytes)}: "
        f"{smallest_with(memory.whole_nbytes)}."
    )


def advice(deployment: DeploymentPlan) -> list[str]:
    """Say which presets to expect most of."""
    if deployment.memory.share == 1:
        return ["everything fits: any loader will do, and `--preset full`"]
    rows = deployment.offered
    exact = next((row for row in rows if not row.alters), None)
    fastest = next(iter(rows), None)
    lines = []
    if exact is not None:
        lines.append(f"without any loss expect most of {exact.preset}: {_speed(deployment, exact)}")
    if fastest is not None and fastest is not exact:
        lines.append(
            f"fastest is {fastest.preset} ({_speed(deployment, fastest)}, {fastest.alters}): "
            "what that costs in quality only the weights can tell"
        )
    return lines


def _speed(deployment: DeploymentPlan, row: Expected) -> str:
    plain = next((each for each in deployment.offered if each.preset == "on-demand"), None)
    if not deployment.is_toy:
        return f"about {row.tokens_per_s:.3g} tokens/s"
    return (
        f"{compared(row.tpot_ms / plain.tpot_ms)} than on-demand"
        if plain and plain is not row
        else "the plain one"
    )


def next_steps(deployment: DeploymentPlan) -> list[str]:
    """Return commands that run the model, or replace assumptions by measurements."""
    request = deployment.request
    budget = f"{100 * deployment.memory.share:.3g}%"
    name = "bundled" if is_bundled(request.model) else request.model
    known = known_name(name)
    folder = name if "/" in name or name == "bundled" else "FOLDER"
    folder = REPOSITORIES[known].hub if known else folder
    can_simulate = deployment.machine is not None and not deployment.rows
    steps = (
        [f"{_command(deployment.request, name)} --simulate: what to expect of each preset"]
        if can_simulate
        else []
    )
    steps += [
        f"moectl run FOLDER --budget {budget}: chat with it, once its files are there",
        "moectl profile FOLDER --hardware: what this machine really takes, for --machine here",
        (
            "moectl profile FOLDER --trace: what the routers really do, which decides how often "
            "an expert is there"
        ),
        (
            f"moectl bench FOLDER --simulate --machine here --presets all --budgets {budget}: the "
            "same table on that trace"
        ),
    ]
    if any("few bits" in row.alters for row in deployment.rows):
        steps.append(
            "moectl quantize FOLDER, then moectl bench FOLDER: what few bits cost on real text"
        )
    return [step.replace("FOLDER", folder) for step in steps]


def _command(request: PlanRequest, name: str) -> str:
    """Return the command of this plan."""
    command = " ".join(
        filter(None, (f"moectl plan {name}", request.place.options, f"--context {request.context}"))
    )
    command += f" --clients {request.num_clients}" if request.clients else ""
    command += "" if request.dense is None else f" --dense {request.dense}"
    kept = request.kv_cache_dtype
    command += f" --kv-cache-dtype {kept}" * (kept != AUTO)
    return command


def assumptions(deployment: DeploymentPlan) -> list[str]:
    """Return what the plan assumes where it has no measurement."""
    place = deployment.request.place
    dense = deployment.request.dense
    own = "in the model's own dtype"
    kept = deployment.request.kv_cache_dtype
    return [
        *(_of_routers(deployment) if deployment.rows else ()),
        *filter(None, (place.note,)),
        *_of_machine(deployment),
        "experts in the format of the checkpoint; all other weights "
        f"{own if dense is None else f'{own}, but linear layers at {dense} bits'}; the cache "
        f"{own if kept == AUTO else f'in {kept}'}; without biases and norms",
        *deployment.assumed,
    ]


def _of_machine(deployment: DeploymentPlan) -> list[str]:
    if deployment.machine is None:
        return [
            (
                "the bandwidths of this GPU are not known here, so that nothing is said of speed: "
                "--machine names one"
            )
        ]
    return [
        f"{deployment.machine.name}: {deployment.machine.source}",
        "time: bytes over bandwidth or operations over peak, whichever is longer; launches, host "
        "work, reading the attention cache, dense layers and norms are not counted, so that real "
        "runs are slower",
    ]


def _of_routers(deployment: DeploymentPlan) -> list[str]:
    layers = deployment.simulated_layers
    whole = deployment.model.shape.num_layers
    sent = requests_of(deployment.request.num_clients)
    length = sent["tokens"] // sent["requests"]
    part = (
        [f"{layers} of {whole} layers are simulated, which are alike in a synthetic trace"]
        if layers < whole
        else []
    )
    return [
        "routers: synthetic, usual ones (skew .8, locality .4, predictability .7), even ones "
        f"(.4, .1, .5), skewed ones (1.2, .6, .9); {sent['requests']} requests of 32 tokens of "
        f"prompt and {length - 32} decoded, {deployment.request.shown_clients}, from an empty "
        "cache",
        *part,
    ]


def record(deployment: DeploymentPlan, answer: PlanAnswer) -> dict[str, object]:
    """The plan as JSON values."""
    memory = deployment.memory
    place = deployment.request.place
    counted = {name: getattr(memory, name) for name in ("share", "files_nbytes", "whole_nbytes")}
    return {
        "model": deployment.model.name,
        "machine": deployment.machine and deployment.machine.name,
        "vram": place.vram,
        "ram_nbytes": place.ram_nbytes,
        "disk_nbytes": place.disk_nbytes,
        "quants": [asdict(fit) for fit in answer.fits],
        "run": command(answer),
        "dense_bits": deployment.request.dense,
        "memory": asdict(memory) | counted,
        "verdict": verdict(deployment),
        "tokens_per_s": deployment.bounds and asdict(deployment.bounds),
        "every_expert_in_few_bits": [asdict(row) for row in deployment.shadows],
        "is_toy": deployment.is_toy,
        "rows": [asdict(row) for row in deployment.rows],
        "exact": deployment.exact and deployment.exact.preset,
        "fastest": deployment.fastest and deployment.fastest.preset,
        "next": next_steps(deployment),
        "assumed": assumptions(deployment),
    }

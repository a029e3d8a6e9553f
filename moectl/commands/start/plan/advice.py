"""Conclusions from a plan: a verdict, the next commands, the assumptions, and the plan as JSON
values."""

from dataclasses import asdict

from moectl.bundled import is_bundled
from moectl.commands.start.plan.place import smallest_with
from moectl.commands.start.plan.rows import DeploymentPlan, Expected, requests_of
from moectl.show.grounds import compared
from moectl.show.render import human_bytes


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
    simulate = " ".join(
        filter(None, (f"moectl plan {name}", request.place.options, f"--context {request.context}"))
    )
    simulate += f" --clients {request.num_clients}" if request.clients else ""
    simulate += "" if request.dense is None else f" --dense {request.dense}"
    can_simulate = deployment.machine is not None and not deployment.rows
    steps = [f"{simulate} --simulate: what to expect of each preset"] if can_simulate else []
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
    return [
        step.replace("FOLDER", name if "/" in name or name == "bundled" else "FOLDER")
        for step in steps
    ]


def assumptions(deployment: DeploymentPlan) -> list[str]:
    """Return what the plan assumes where it has no measurement."""
    place = deployment.request.place
    dense = deployment.request.dense
    own = "in the model's own dtype"
    return [
        *(_of_routers(deployment) if deployment.rows else ()),
        *filter(None, (place.note,)),
        *_of_machine(deployment),
        "experts in the format of the checkpoint; all other weights "
        f"{own if dense is None else f'{own}, but linear layers at {dense} bits'}; the cache "
        f"{own}; without biases and norms",
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


def record(deployment: DeploymentPlan) -> dict[str, object]:
    """The plan as JSON values."""
    memory = deployment.memory
    counted = {
        "share": memory.share,
        "files_nbytes": memory.files_nbytes,
        "whole_nbytes": memory.whole_nbytes,
    }
    return {
        "model": deployment.model.name,
        "machine": deployment.machine and deployment.machine.name,
        "vram": deployment.request.place.vram,
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

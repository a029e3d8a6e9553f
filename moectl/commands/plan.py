"""`moectl plan`: from a config alone, without weights: what fits, what to expect, what to do next."""

from dataclasses import asdict

from moectl.bundled import as_named, demo_model
from moectl.commands.plan_rows import DeploymentPlan, PlanRequest, plan_deployment
from moectl.shared.progress import progress_bar
from moectl.show.render import NumBytes, Sheet, console, human_bytes, show_json, show_sheet


def plan(
    model: str, *, vram: str, machine: str, context: int, simulate: bool, dense: int | None = None
) -> DeploymentPlan:
    """Plan for a model by its name, or by a folder or file with its config; `simulate` replays every preset."""
    deployment = plan_deployment(PlanRequest(as_named(model) or str(demo_model()), vram, machine, context, dense))
    if not simulate:
        return deployment
    from moectl.commands.plan_simulation import simulated

    with progress_bar("simulating", unit="presets") as advance:
        return simulated(deployment, advance)


def show(deployment: DeploymentPlan, *, as_json: bool) -> None:
    """Print tables and advice, or one JSON object."""
    if as_json:
        show_json(_record(deployment))
        return
    show_sheet(_memory(deployment))
    show_sheet(_speeds(deployment) if deployment.rows else _bounds(deployment))
    not_tried = (f"not tried: {row.preset}: {row.why}" for row in deployment.rows if row.why)
    for line in (*not_tried, *_advice(deployment), *(f"assumed: {line}" for line in assumptions(deployment))):
        console().print(line, markup=False)


def _memory(deployment: DeploymentPlan) -> Sheet:
    memory, shape = deployment.memory, deployment.model.shape
    rows = [
        (f"weights besides routed experts, {_kept(deployment.request.dense)}", NumBytes(memory.weights_nbytes)),
        (f"attention cache, {deployment.request.context:,} tokens", NumBytes(memory.cache_nbytes)),
        ("reserve: driver, activations, buffers", NumBytes(memory.reserve_nbytes)),
        (f"left for experts, {memory.share:.1%} of them", NumBytes(memory.experts_nbytes)),
        ("all routed experts as stored: in host memory, or on disk", NumBytes(memory.all_experts_nbytes)),
        ("the checkpoint's files", NumBytes(memory.files_nbytes)),
    ]
    note = (
        f"{shape.num_layers} layers of {shape.num_experts} experts, {human_bytes(shape.expert_nbytes)} each, "
        f"{shape.top_k} a token"
    )
    return Sheet(f"{deployment.model.name} in {deployment.request.vram}", ("what", "bytes"), rows, note)


def _kept(dense: int | None) -> str:
    own = "in the model's own dtype"
    return own if dense is None else f"linear layers at {dense} bits, others {own}"


def _bounds(deployment: DeploymentPlan) -> Sheet:
    bounds, share = deployment.bounds, deployment.memory.share
    rows = [
        ("none: every expert comes over the link", bounds.none, 1e3 / bounds.none),
        (f"{share:.1%}, as fits, and even routers", bounds.share, 1e3 / bounds.share),
        ("all", bounds.all, 1e3 / bounds.all),
    ]
    columns = ("experts in the GPU's memory", "tokens/s", "ms/token")
    note = "one request at a time, without prefetching; --simulate replays every preset"
    return Sheet(f"Expected on {deployment.machine.name}, by bytes over bandwidth", columns, rows, note)


def _speeds(deployment: DeploymentPlan) -> Sheet:
    columns = ("preset", "tokens/s", "from", "to", "ms/token", "hit rate", "moved/token", "output altered by")
    rows = [
        (
            row.preset,
            row.tokens_per_s,
            row.least,
            row.most,
            row.tpot_ms,
            row.hit_rate,
            NumBytes(row.moved_nbytes),
            row.alters or "-",
        )
        for row in deployment.rows
        if not row.why
    ]
    note = "from, to: the least and the most of three kinds of routers"
    return Sheet(f"Expected on {deployment.machine.name}, on virtual time", columns, rows, note)


def _advice(deployment: DeploymentPlan) -> list[str]:
    if deployment.memory.share == 1:
        return ["everything fits: any loader will do, and `--preset full`"]
    exact, fastest = deployment.exact, deployment.fastest
    lines = []
    if exact is not None:
        lines.append(f"without any loss expect most of {exact.preset}: about {exact.tokens_per_s:.3g} tokens/s")
    if fastest is not None and fastest is not exact:
        lines.append(
            f"fastest is {fastest.preset} ({fastest.tokens_per_s:.3g} tokens/s, {fastest.alters}): "
            "what that costs in quality only the weights can tell"
        )
    return lines + [f"next: {step}" for step in next_steps(deployment)]


def next_steps(deployment: DeploymentPlan) -> list[str]:
    """Return commands that replace assumptions by measurements."""
    request, budget = deployment.request, f"{100 * deployment.memory.share:.3g}%"
    name = request.model
    simulate = f"moectl plan {name} --vram {request.vram} --machine {request.machine} --context {request.context}"
    simulate += "" if request.dense is None else f" --dense {request.dense}"
    steps = [] if deployment.rows else [f"{simulate} --simulate: what to expect of each preset"]
    steps += [
        "moectl profile FOLDER --hardware: what this machine really takes, for --machine here",
        "moectl profile FOLDER --trace: what the routers really do, which decides how often an expert is there",
        f"moectl bench FOLDER --simulate --machine here --presets all --budgets {budget}: the same table on that trace",
    ]
    if any("few bits" in row.alters for row in deployment.rows):
        steps.append("moectl quantize FOLDER, then moectl bench FOLDER: what few bits cost on real text")
    return [step.replace("FOLDER", name if "/" in name else "FOLDER") for step in steps]


def assumptions(deployment: DeploymentPlan) -> list[str]:
    """Return what the plan assumes where it has no measurement."""
    return [
        *(_of_routers(deployment) if deployment.rows else ()),
        f"{deployment.machine.name}: {deployment.machine.source}",
        "time: bytes over bandwidth or operations over peak, whichever is longer; launches, host work, reading the "
        "attention cache, dense layers and norms are not counted, so that real runs are slower",
        f"experts in the format of the checkpoint; all other weights: {_kept(deployment.request.dense)}; the cache in "
        "the model's own dtype; without biases and norms",
        *deployment.assumed,
    ]


def _of_routers(deployment: DeploymentPlan) -> list[str]:
    layers, whole = deployment.simulated_layers, deployment.model.shape.num_layers
    part = [f"{layers} of {whole} layers are simulated, which are alike in a synthetic trace"] if layers < whole else []
    return [
        "routers: synthetic, usual ones (skew .8, locality .4, predictability .7), even ones (.4, .1, .5), skewed ones "
        "(1.2, .6, .9); 4 requests of 32 tokens of prompt and 96 decoded, one at a time, from an empty cache",
        *part,
    ]


def _record(deployment: DeploymentPlan) -> dict[str, object]:
    memory = deployment.memory
    return {
        "model": deployment.model.name,
        "machine": deployment.machine.name,
        "dense_bits": deployment.request.dense,
        "memory": asdict(memory) | {"share": memory.share, "files_nbytes": memory.files_nbytes},
        "tokens_per_s": asdict(deployment.bounds),
        "rows": [asdict(row) for row in deployment.rows],
        "exact": deployment.exact and deployment.exact.preset,
        "fastest": deployment.fastest and deployment.fastest.preset,
        "next": next_steps(deployment),
        "assumed": assumptions(deployment),
    }

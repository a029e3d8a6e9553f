"""`moectl plan`: from a config alone, without weights: what fits, what to expect of each preset, what to do next."""

from dataclasses import asdict

from moectl.bundled import as_named, demo_model
from moectl.commands.plan_rows import DeploymentPlan, PlanRequest
from moectl.commands.plan_rows import plan as planned
from moectl.shared.progress import progress_bar
from moectl.show.render import NumBytes, Sheet, console, human_bytes, show_json, show_sheet


def plan(model: str, *, vram: str, machine: str, context: int) -> DeploymentPlan:
    """Of a model's name, or a folder or file with its config."""
    request = PlanRequest(as_named(model) or str(demo_model()), vram, machine, context)
    with progress_bar("simulating", unit="presets") as advance:
        return planned(request, advance)


def show(found: DeploymentPlan, *, as_json: bool) -> None:
    """Print tables and advice, or one JSON object."""
    if as_json:
        show_json(_record(found))
        return
    show_sheet(_memory(found))
    show_sheet(_speeds(found))
    not_tried = (f"not tried: {row.preset}: {row.why}" for row in found.rows if row.why)
    for line in (*not_tried, *_advice(found), *(f"assumed: {line}" for line in assumptions(found))):
        console().print(line, markup=False)


def _memory(found: DeploymentPlan) -> Sheet:
    memory, shape = found.memory, found.model.shape
    rows = [
        ("weights besides routed experts", NumBytes(memory.weights_nbytes)),
        (f"attention cache, {found.request.context:,} tokens", NumBytes(memory.cache_nbytes)),
        ("reserve: driver, activations, buffers", NumBytes(memory.reserve_nbytes)),
        (f"left for experts, {memory.share:.1%} of them", NumBytes(memory.experts_nbytes)),
        ("all routed experts: in host memory, or on disk", NumBytes(memory.all_experts_nbytes)),
    ]
    note = (
        f"{shape.num_layers} layers of {shape.num_experts} experts, {human_bytes(shape.expert_nbytes)} each, "
        f"{shape.top_k} a token"
    )
    return Sheet(f"{found.model.name} in {found.request.vram}", ("what", "bytes"), rows, note)


def _speeds(found: DeploymentPlan) -> Sheet:
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
        for row in found.rows
        if not row.why
    ]
    note = "from, to: the least and the most of three kinds of routers"
    return Sheet(f"Expected on {found.machine.name}, on virtual time", columns, rows, note)


def _advice(found: DeploymentPlan) -> list[str]:
    if found.memory.share == 1:
        return ["everything fits: any loader will do, and `--preset full`"]
    lines = []
    if found.exact is not None:
        lines.append(
            f"without any loss expect most of {found.exact.preset}: about {found.exact.tokens_per_s:.3g} tokens/s"
        )
    if found.fastest is not found.exact:
        lines.append(
            f"fastest is {found.fastest.preset} ({found.fastest.tokens_per_s:.3g} tokens/s, {found.fastest.alters}): "
            "what that costs in quality only the weights can tell"
        )
    return lines + [f"next: {step}" for step in next_steps(found)]


def next_steps(found: DeploymentPlan) -> list[str]:
    """Commands that turn assumptions into measurements."""
    name, budget = found.request.model, f"{100 * found.memory.share:.3g}%"
    steps = [
        "moectl profile FOLDER --hardware: what this machine really takes, for --machine here",
        "moectl profile FOLDER --trace: what the routers really do; it decides between the columns from and to",
        f"moectl bench FOLDER --simulate --machine here --presets all --budgets {budget}: the same table on that trace",
    ]
    if any("few bits" in row.alters for row in found.rows):
        steps.append("moectl quantize FOLDER, then moectl bench FOLDER: what few bits cost on real text")
    return [step.replace("FOLDER", name if "/" in name else "FOLDER") for step in steps]


def assumptions(found: DeploymentPlan) -> list[str]:
    """What was put in place of what is not known."""
    layers, whole = found.simulated_layers, found.model.shape.num_layers
    part = [f"{layers} of {whole} layers are simulated, which are alike in a synthetic trace"] if layers < whole else []
    return [
        "routers: synthetic, usual ones (skew .8, locality .4, predictability .7), even ones (.4, .1, .5), skewed ones "
        "(1.2, .6, .9); 4 requests of 32 tokens of prompt and 96 decoded, one at a time, from an empty cache",
        *part,
        f"{found.machine.name}: {found.machine.source}",
        "time: bytes over bandwidth or operations over peak, whichever is longer; launches, host work, reading the "
        "attention cache, dense layers and norms are not counted, so that real runs are slower",
        "weights besides experts in the checkpoint's own precision, the cache in 16 bits; without biases and norms",
        *found.assumed,
    ]


def _record(found: DeploymentPlan) -> dict[str, object]:
    return {
        "model": found.model.name,
        "machine": found.machine.name,
        "memory": asdict(found.memory) | {"share": found.memory.share},
        "rows": [asdict(row) for row in found.rows],
        "exact": found.exact and found.exact.preset,
        "fastest": found.fastest and found.fastest.preset,
        "next": next_steps(found),
        "assumed": assumptions(found),
    }

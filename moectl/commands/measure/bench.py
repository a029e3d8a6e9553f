"""`moectl bench`: measure presets beside each other at every budget and over every link, speed next
to quality."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.errors import Incompatible
from moectl.bundled import demo_model
from moectl.cli import completion
from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    Base,
    Clients,
    Data,
    Dense,
    Device,
    Devices,
    Executor,
    Experts,
    Json,
    Model,
    ScaledTo,
    Seed,
    StorePath,
    Threads,
    known_machine,
    known_presets,
)
from moectl.commands.measure.report import check_report, write_page
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from moectl.bench.request import BenchRequest


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a bench: the presets to measure, the text or trace to use, and the results to show
    beside them."""

    presets: Annotated[
        str,
        typer.Option(
            help=(
                "Presets, a,b,c, or all; full, uniform-bits, on-demand and near always stand "
                "beside."
            ),
            callback=known_presets,
            autocompletion=completion.listed(completion.presets),
        ),
    ] = "on-demand,near,shadow"
    budgets: Annotated[str, typer.Option(help="Budgets, each like --budget elsewhere.")] = (
        "12.5%,25%,50%"
    )
    links: Annotated[
        str,
        typer.Option(
            help="Links, each like --link elsewhere; with --simulate auto (the machine's) or rates."
        ),
    ] = "auto"
    scaled_to: ScaledTo = None
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="On a trace and virtual time: the oracle too, no quality."),
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(help="A Parquet trace; else the store's newest, or one recorded first."),
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(
            help="Whose bandwidths to simulate (a100-pcie4), or here: as profiled.",
            autocompletion=completion.machines,
            callback=known_machine,
        ),
    ] = None
    clients: Clients = None
    data: Data = "builtin:held-out"
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of it that each setting reads in a round.")
    ] = 768
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of a sequence; half are prompt, half are decoded.")
    ] = 128
    rounds: Annotated[int, typer.Option(min=1, help="Times that each setting is measured.")] = 3
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what an earlier run has finished.")
    ] = False
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            help="Show what another tool measured too: llama-bench -o json, vllm bench serve.",
        ),
    ] = None
    report: Annotated[
        Path | None, typer.Option(help="Write it all as one HTML page, with charts.")
    ] = None
    peers: Annotated[
        str,
        typer.Option(
            help="Other programs beside them: transformers-eager, -batched, -grouped, "
            "accelerate-disk, -cpu, llama.cpp-bf16, -q8_0, -q4_0, -mxfp4, or all."
        ),
    ] = ""
    tasks: Annotated[
        str,
        typer.Option(
            help=(
                "Tasks of lm-evaluation-harness too: continuations, a YAML file, a folder of "
                "them, lm-eval:NAME."
            )
        ),
    ] = ""
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of --tasks at a time; else 64, or 1 where a preset alters the output.",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --simulate: settings at a time, each in a process of its own."
        ),
    ] = None
    executor: Executor = "local"
    base: Base = 16
    dense: Dense = None
    experts: Experts = "exact"
    device: Device = "auto"
    devices: Devices = 1
    threads: Threads = DEFAULT_THREADS
    seed: Seed = 0


@resumable("what was measured is kept")
def bench(
    *,
    model: Model = None,
    options: BenchOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Compare presets: speed next to quality.

    Stopped half-way, the same command goes on.
    """
    with importing():
        from moectl.bench.live import live
        from moectl.bench.other_tools import keep, read_results
        from moectl.bench.request import BenchRequest, names_of
        from moectl.bench.sheets import sheets
        from moectl.bench.simulated import simulated
        from moectl.shared.terminal.progress import Phases
        from moectl.show.render import show_json, show_sheet
        from runtime.session.presets import find_presets

    stored = find_presets(names_of(options.presets, "--presets"), store)
    request = fill(BenchRequest, options, stored=stored)
    page = options.report
    if page:
        check_report(page)
    name = model or str(demo_model())
    if not request.simulate:  # a replay counts in its trace what the store lacks
        _check_any_runs(request, name, store)
    imported = [read_results(path) for path in options.results or ()]
    measure = simulated if request.simulate else live
    with Phases(1, 1, 18, is_quiet=json) as phases:
        benched = measure(
            name, request, phases, store=store, device=options.device, threads=options.threads
        )
    rows = [row for result in imported for row in keep(result, store=store)]
    notes = (*benched.notes, *(result.note for result in imported))
    if page and benched.has_run:
        write_page(page, store=store, job=benched.job)
        notes += (f"report: {page}",)
    benched = replace(benched, rows=[*benched.rows, *rows], notes=notes)
    if json:
        show_json(benched.records())
        return
    for sheet in sheets(benched):
        show_sheet(sheet)


def _check_any_runs(request: "BenchRequest", name: str, store: Path) -> None:
    """Raise Incompatible where the store lacks what each of the presets requires; where some can
    run, the others have their reason in the table."""
    from runtime.policies import build
    from runtime.policies.presets import preset
    from runtime.session.presets import check_stored

    missing = []
    for asked in request.asked:
        try:
            if asked not in request.peer_names:
                policies = build(preset(request.stored.get(asked, asked)).texts())
                check_stored(policies, store, name=name, base=request.base)
        except Incompatible as problem:
            missing.append(problem)
    if len(missing) == len(request.asked) and missing:
        raise missing[0]

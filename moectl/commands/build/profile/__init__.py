"""`moectl profile`: record what a model's routers select over text, into the store."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.errors import BadUsage
from moectl.bundled import demo_model
from moectl.cli.groups import fill
from moectl.cli.options import (
    Data,
    EngineOptions,
    Executor,
    Json,
    Length,
    Model,
    Seed,
    Sequences,
    StorePath,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    import numpy as np

    from moectl.show.render import Sheet
    from profilers.routing.profile import Profiled
    from profilers.text.batches import Batching
    from runtime.session.session import Session


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The text, how it is cut into batches, and what else is recorded or measured."""

    data: Data = "builtin"
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to profile.")] = 65_536
    trace: Annotated[bool, typer.Option("--trace", help="Keep the whole trace, for replays.")] = (
        False
    )
    distance: Annotated[
        int, typer.Option(min=1, help="Layers ahead of which the trace keeps what was foreseen.")
    ] = 1
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware", help="Measure the machine instead: seconds of parts, loads, near memory."
        ),
    ] = False
    similarity: Annotated[
        bool,
        typer.Option(
            "--similarity/--no-similarity",
            help="Measure what experts are worth in each other's place.",
        ),
    ] = True
    samples: Annotated[int, typer.Option(min=1, help="Tokens on which that is measured.")] = 512
    length: Length = 256
    prefill: Annotated[
        int, typer.Option(min=0, help="Of them the prompt; the rest counts as decode.")
    ] = 64
    batch: Sequences = 16
    shard: Annotated[
        str, typer.Option(help="i/N: only this share of the batches; `moectl merge` joins them.")
    ] = "1/1"
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Processes that count, each on one thread and with the budget; else this one alone."
            ),
        ),
    ] = None
    executor: Executor = "local"


def profile(
    *,
    model: Model = None,
    options: ProfileOptions,
    engine: EngineOptions,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Record what a model's routers do, or what a machine does.

    Stopped half-way, the same command goes on.
    """
    if options.hardware:
        from moectl.commands.build.profile import hardware

        if options.trace or options.shard != "1/1" or options.jobs or options.executor != "local":
            raise BadUsage(
                "--hardware measures the machine and reads no text: leave out --trace, --shard, "
                "--jobs and --executor"
            )
        hardware.show(hardware.profile_hardware(model, engine, store=store), as_json=json)
        return
    with importing():
        from profilers.text.batches import Batching
        from profilers.workers.choose import check_executor

    index, count = parse_shard(options.shard)
    batching = fill(Batching, options, index=index, count=count)
    check_executor(options.executor)
    profiled = _profile(model, engine, options, batching, seed=seed, store=store)
    show(profiled, as_json=json)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/N`, i from 1, into an index from 0 and a count."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise BadUsage(f"shard {text!r} is not understood: write i/N, as 1/4")
    return int(index) - 1, int(count)


@resumable("batches that were counted are kept")
def _profile(
    name: str | None,
    engine: EngineOptions,
    options: ProfileOptions,
    batching: "Batching",
    *,
    seed: int,
    store: Path,
) -> "Profiled":
    from moectl.shared.opening import open_quietly
    from moectl.shared.terminal.progress import Phases
    from moectl.shared.stores import check_store
    from profilers.text.corpus import documents
    from profilers.workers.choose import check_device, is_spread
    from runtime.session.session import Session

    name = name or str(demo_model())
    settings = engine.settings()
    check_store(store)
    documents(options.data)  # a wrong path is reported before a model is opened
    with Phases(1, 19) as phases:
        phases.begin("opening the model")
        opened = open_quietly(name, device=settings.device)
        if is_spread(options.executor, options.jobs):
            check_device(opened)
            # as in every worker: the numbers must not depend on their number
            settings = replace(settings, threads=1)
        with Session(opened, settings) as session:
            phases.begin(f"profiling on {options.tokens:,} tokens")
            return profile_opened(name, session, options, batching, seed=seed, store=store)


def profile_opened(
    name: str,
    session: "Session",
    options: ProfileOptions,
    batching: "Batching",
    *,
    seed: int,
    store: Path,
) -> "Profiled":
    """Profile the model of a session."""
    from moectl.shared.opening import model_info
    from moectl.shared.terminal.progress import progress_bar
    from moectl.shared.stores import foresight_for
    from moectl.shared.text import read_data
    from profilers.routing.profile import profile_routing
    from profilers.workers.choose import executing, is_spread

    data = read_data(
        session.opened,
        options.data,
        length=batching.length,
        num_tokens=options.tokens,
        seed=seed,
    )
    info = model_info(name, session.opened)
    spread = is_spread(options.executor, options.jobs)
    workers = executing(options.executor, options.jobs) if spread else nullcontext()
    with workers as executor, progress_bar("profiling", unit="tokens") as advance:
        return profile_routing(
            session,
            data,
            batching,
            model=info,
            store_path=store,
            keep_trace=foresight_for(session.opened, options.distance, store=store)
            if options.trace
            else None,
            num_samples=options.samples if options.similarity else 0,
            executor=executor,
            progress=advance,
        )


def show(profiled: "Profiled", *, as_json: bool) -> None:
    """Print a table with a row for each layer, or one JSON object."""
    from moectl.show.render import show_json, show_sheet

    sheet = _layer_sheet(profiled)
    if as_json:
        summary = {
            "run": profiled.run_id,
            "tokens": profiled.num_tokens,
            "seconds": profiled.seconds,
        }
        summary |= {"resumed_batches": profiled.resumed, "shortfall": profiled.shortfall}
        show_json(summary | {"layers": sheet.records()})
    else:
        show_sheet(sheet)


def _layer_sheet(profiled: "Profiled") -> "Sheet":
    """Return how evenly each layer uses its experts and how undecided its router is."""
    from moectl.show.render import Sheet, fewer

    rows = []
    for layer, use in enumerate(profiled.profile.use):
        median = float(profiled.profile.entropy[layer].percentiles()[50])
        rows.append((layer, *_evenness(use), median))
    columns = (
        "layer",
        "experts used",
        "evenness of use",
        "share of the busiest quarter",
        "median token entropy",
    )
    note = (
        f"run {profiled.run_id}: {profiled.num_tokens:,} tokens in {profiled.seconds:.1f} "
        f"s{fewer(profiled.shortfall)}"
    )
    return Sheet("Routing profile", columns, rows, note)


def _evenness(use: "np.ndarray") -> tuple[int, float, float]:
    """Return the number of experts used, the evenness of their use, and the share of the busiest
    quarter."""
    import numpy as np

    share = np.sort(use.sum(axis=0))[::-1] / max(1, use.sum())
    active = share[share > 0]
    evenness = -(active * np.log(active)).sum() / np.log(len(share)) if len(share) > 1 else 0.0
    return len(active), evenness, share[: max(1, len(share) // 4)].sum()

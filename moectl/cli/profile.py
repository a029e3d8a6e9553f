"""The command line of `moectl profile` and `moectl merge`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import Data, EngineOptions, Executor, Json, Model, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


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
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256
    prefill: Annotated[
        int, typer.Option(min=0, help="Of them the prompt; the rest counts as decode.")
    ] = 64
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences at a time; an expert is loaded once for all.")
    ] = 16
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
        _profile_hardware(model, options, engine, store=store, as_json=json)
        return
    with importing():
        from moectl.commands.build import profile as command
        from profilers.text.batches import Batching

    index, count = command.parse_shard(options.shard)
    batching = fill(Batching, options, index=index, count=count)
    samples = options.samples if options.similarity else 0
    request = fill(command.ProfileRequest, options, batching=batching, samples=samples, seed=seed)
    command.show(command.profile(model, engine.settings(), request, store=store), as_json=json)


def _profile_hardware(
    model: str | None, options: ProfileOptions, engine: EngineOptions, *, store: Path, as_json: bool
) -> None:
    with importing():
        from moectl.commands.build.profile import hardware as command

    is_spread = options.jobs is not None or options.executor != "local"
    command.refuse_routing(trace=options.trace, shard=options.shard, is_spread=is_spread)
    measured = command.profile_hardware(
        model, link=engine.link, device=engine.device, threads=engine.threads, store=store
    )
    command.show(measured, as_json=as_json)


def merge(
    *,
    shards: Annotated[
        list[Path], typer.Argument(help="Stores that hold the shards of one profile.")
    ],
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Merge the shards of a profile into one.

    In any order the numbers are the same.
    """
    with importing():
        from moectl.commands.build import profile as command

    command.show(command.merge(shards, store=store), as_json=json)

"""The command line of `moectl tune`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    Base,
    Budget,
    Clients,
    Device,
    Executor,
    Experts,
    Json,
    Link,
    Model,
    ScaledTo,
    Seed,
    StorePath,
    Threads,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options of a search: its goal, its duration, and the text to verify the picks on."""

    budget: Budget = "25%"
    scaled_to: ScaledTo = None
    link: Link = "auto"
    max_loss: Annotated[
        str, typer.Option(help="Of perplexity, at most: 0.5%, or 0 for lossless alone.")
    ] = "0.5%"
    minutes: Annotated[float, typer.Option(help="How long all of it takes, about.")] = 3.0
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="Combinations to try of each kind, whatever time that takes."),
    ] = None
    data: Annotated[str, typer.Option(help="Text to record a trace on, if the store has none.")] = (
        "builtin"
    )
    held_out: Annotated[str, typer.Option(help="Text to verify on.")] = "builtin:held-out"
    check_data: Annotated[
        str | None,
        typer.Option(help="Text of another kind, to see what the picks are worth there."),
    ] = None
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to verify on.")] = 2048
    length: Annotated[
        int, typer.Option(min=2, help="Tokens of a sequence; half are prompt, half are decoded.")
    ] = 128
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured live.")] = 5
    base: Base = 16
    experts: Experts = "exact"
    name: Annotated[str, typer.Option(help="The preset that the pick becomes.")] = "tuned"
    clients: Clients = None
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Candidates replayed at a time, each in a process of its own."),
    ] = None
    executor: Executor = "local"
    device: Device = "auto"
    threads: Threads = DEFAULT_THREADS
    seed: Seed = 0


def tune(
    *,
    model: Model = None,
    options: TuneOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Find the fastest policies for a model and a machine.

    One answer loses nothing, the other no more than --max-loss; `moectl run --preset` takes both by
    name.
    """
    with importing():
        from moectl.commands.measure import tune as command
    from moectl.tune.request import TuneRequest, share
    from moectl.tune.table import show

    request = fill(TuneRequest, options, max_loss=share(options.max_loss))
    tuned = command.tune(
        model, request, store=store, device=options.device, threads=options.threads, is_quiet=json
    )
    show(tuned, as_json=json)

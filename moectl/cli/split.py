"""The command line of `moectl split`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moectl.cli import completion
from moectl.cli.groups import fill
from moectl.cli.options import Budget, Json, StorePath, known_machine
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """The trace, the machine whose latencies count, and how to solve."""

    trace: Annotated[
        Path | None,
        typer.Option(help="A Parquet trace with predictions, as `moectl run` writes it."),
    ] = None
    run: Annotated[
        int | None,
        typer.Option(
            "--run", min=1, help="A run of the store that kept its trace; else the newest."
        ),
    ] = None
    synthetic: Annotated[
        str | None, typer.Option(help="Make a trace: skew=0.8,locality=0.4,...")
    ] = None
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Whose trace: a folder, bundled, or a name as mixtral-8x7b for its shape alone."
        ),
    ] = None
    machine: Annotated[
        str,
        typer.Option(
            help="Whose latencies: a named machine's, or here: the store's hardware profile.",
            autocompletion=completion.machines,
            callback=known_machine,
        ),
    ] = "here"
    link: Annotated[
        str | None, typer.Option(help="Which link of the hardware profile; else the one of a run.")
    ] = None
    budget: Budget = "25%"
    solver: Annotated[
        str,
        typer.Option(
            help=(
                "dynamic; greedy, as published; or replay: of both and of even cuts what runs "
                "the trace fastest."
            )
        ),
    ] = "replay"
    zeta: Annotated[
        float, typer.Option(help="Share of the whole budget that greedy moves at a time.")
    ] = 0.01
    eviction: Annotated[
        str, typer.Option(help="What the caches evict by, as in the run that follows the split.")
    ] = "lcp"


def split(
    *,
    options: SplitOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Share a budget between layers, and split experts.

    So that compute waits least (MoEpic).
    """
    with importing():
        from moectl.commands.build import split as command
    from moectl.shared.trace_source import TraceSource

    source = fill(TraceSource, options, store=store)
    command.show(command.split(source, fill(command.SplitRequest, options)), as_json=json)

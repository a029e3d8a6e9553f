"""The command line of `moectl fit-trace`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.options import Json, NumExperts, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import of_clone


def fit_trace(
    *,
    like: Annotated[Path | None, typer.Option(help="The Parquet trace to be like.")] = None,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="A run of the store that kept its trace.")
    ] = None,
    hits: Annotated[
        list[str] | None,
        typer.Option(
            help="Hit rates to reach: lru:10=.23,20=.4 (experts held a layer); repeatable."
        ),
    ] = None,
    num_experts: NumExperts = None,
    model: Annotated[
        str | None, typer.Option(help="Whose shape: a name as mixtral-8x7b, or a folder.")
    ] = None,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Fit a synthetic trace to a real one, or to hit rates.

    It finds the dials that `moectl simulate --synthetic` takes.
    """
    from moectl.shared.trace_source import TraceSource

    command = of_clone("tools.lab.fit_trace", "fit-trace")
    source = TraceSource(like, run, num_experts=num_experts, model=model, store=store)
    command.show(command.fit_trace(source, hits or [], seed=seed), as_json=json)

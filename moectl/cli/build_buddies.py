"""The command line of `moectl build-buddies`."""

from typing import Annotated

import typer

from moectl.cli.options import Json, RunId, StorePath
from moectl.shared.defaults import DEFAULT_STORE


def build_buddies(
    *,
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    alpha: Annotated[
        str,
        typer.Option(
            help=(
                "Share of the metric that a list covers: one number, one per layer, or "
                "LAYER:NUMBER,..."
            )
        ),
    ] = "0.95",
    k_max: Annotated[int, typer.Option(min=1, help="Longest list.")] = 16,
    metric: Annotated[
        str,
        typer.Option(
            help="What ranks buddies: loss or output (both measured), coactivation or weighted."
        ),
    ] = "loss",
    epsilon: Annotated[
        float,
        typer.Option(help="Laplace smoothing: added to every count of coactivation or weighted."),
    ] = 0.0,
    json: Json = False,
) -> None:
    """List, for each expert, which others may stand in for it.

    The lists are built from a profile.
    """
    from moectl.commands.build import build_buddies as command

    built = command.build_buddies(
        store, run=run, alpha=alpha, k_max=k_max, metric=metric, epsilon=epsilon
    )
    command.show(built, as_json=json)

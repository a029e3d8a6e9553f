"""The command line: each command parses its options, calls one function of `moectl.commands` and shows the result.

Everything heavy is imported inside the commands, so that `moectl --help` stays fast.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from moectl.errors import exit_code_of
from moectl.options import DEFAULT_STORE, Json, RunId, StorePath

app = typer.Typer(
    name="moectl",
    help="Run a Mixture-of-Experts model that is larger than the memory of the GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (by default that of the command line) and return its exit code."""
    return exit_code_of(lambda: app(args=arguments, prog_name="moectl"))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from artifacts.provenance import versions

        print("moectl", versions().get("moectl", "(not installed)"))
        raise typer.Exit


@app.callback()
def _moectl(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command("build-buddies")
def _build_buddies(
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    alpha: Annotated[
        str,
        typer.Option(help="Share of co-activation that a list covers: one number, one per layer, or LAYER:NUMBER,..."),
    ] = "0.95",
    k_max: Annotated[int, typer.Option(min=1, help="Longest list.")] = 16,
    metric: Annotated[str, typer.Option(help="What ranks buddies: coactivation or weighted.")] = "coactivation",
    json: Json = False,
) -> None:
    """Build buddy lists from a profile: for each expert, the peers that may stand in for it."""
    from moectl.commands import build_buddies as verb

    verb.show(verb.build_buddies(store, run=run, alpha=alpha, k_max=k_max, metric=metric), as_json=json)


@app.command("inspect")
def _inspect(
    name: Annotated[
        str,
        typer.Argument(help="store, runs, activations, coactivation, entropy, buddies, presets, policies or machines."),
    ] = "store",
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    layer: Annotated[int | None, typer.Option(min=0, help="One layer in detail.")] = None,
    heatmap: Annotated[bool, typer.Option("--heatmap", help="A picture instead of a table.")] = False,
    json: Json = False,
) -> None:
    """Show what a store holds, or what moectl knows, as a table or as a heatmap."""
    from moectl.commands import inspect as verb

    verb.show(verb.inspect(name, store, run=run, layer=layer), heatmap=heatmap, as_json=json)

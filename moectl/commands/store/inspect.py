"""The command line of `moectl inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    Budget,
    Device,
    Json,
    RunId,
    Seed,
    StorePath,
    Threads,
    Window,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import of_clone


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """The run and the layer to show, and on what substitution, precision and prefetching are
    measured."""

    run: RunId = None
    layer: Annotated[int | None, typer.Option(min=0, help="One layer in detail.")] = None
    heatmap: Annotated[bool, typer.Option("--heatmap", help="A picture instead of a table.")] = (
        False
    )
    picture: Annotated[Path | None, typer.Option(help="Write that picture to this SVG file.")] = (
        None
    )
    verify: Annotated[
        bool, typer.Option("--verify", help="Of store and replicas: read it all and compare.")
    ] = False
    data: Annotated[str, typer.Option(help="Held-out text, for substitution and precision.")] = (
        "builtin:held-out"
    )
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of it.")] = 4096
    draws: Annotated[
        int, typer.Option(min=1, help="Random draws: of resident experts, of widths.")
    ] = 3
    shares: Annotated[str, typer.Option(help="Shares of resident experts, for substitution.")] = (
        "0.75,0.5,0.375"
    )
    trace: Annotated[
        Path | None, typer.Option(help="For prefetch: a Parquet trace; else the store's.")
    ] = None
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer, of that trace.")] = (
        None
    )
    distance: Annotated[
        int, typer.Option(min=1, help="For prefetch: up to so many layers ahead.")
    ] = 3
    budget: Budget = "25%"
    eviction: Annotated[str, typer.Option(help="For prefetch: what is evicted meanwhile.")] = (
        "least_stale"
    )
    window: Window = None
    device: Device = "auto"
    threads: Threads = DEFAULT_THREADS
    seed: Seed = 0


def inspect(
    *,
    name: Annotated[
        str,
        typer.Argument(
            help="store, runs, activations, coactivation, entropy, similarity, buddies, "
            "quant-loss, replicas, curves, splits, maps, predictors, presets, policies, "
            "machines, substitution, precision or prefetch."
        ),
    ] = "store",
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint, or after presets the name of one.", show_default=False),
    ] = None,
    store: StorePath = DEFAULT_STORE,
    options: InspectOptions,
    json: Json = False,
) -> None:
    """Show what a store holds, or what moectl knows.

    As a table or a heatmap. It also prices substitution, few bits and prefetching.
    """
    if options.picture is not None:
        from moectl.charts.pictures import check_picture
        from moectl.commands.inspect import refuse_picture

        refuse_picture(name)
        check_picture(options.picture)
    if name == "substitution":
        _price_substitution(model, options, store=store, as_json=json)
    elif name == "precision":
        _price_precision(model, options, store=store, as_json=json)
    elif name == "prefetch":
        _price_prefetching(model, options, store=store, as_json=json)
    elif name == "store" and options.verify:
        _check_store(model, options, store=store, as_json=json)
    else:
        _show_view(name, model, options, store=store, as_json=json)


def _price_substitution(
    model: str | None, options: InspectOptions, *, store: Path, as_json: bool
) -> None:
    command = of_clone("tools.lab.substitution", "inspect substitution")
    command.refuse_views(heatmap=options.heatmap, layer=options.layer)
    request = fill(
        command.SubstitutionRequest, options, shares=command.parse_shares(options.shares)
    )
    priced = command.substitution(
        model, request, store=store, run=options.run, device=options.device, threads=options.threads
    )
    command.show(priced, as_json=as_json)


def _price_precision(
    model: str | None, options: InspectOptions, *, store: Path, as_json: bool
) -> None:
    command = of_clone("tools.lab.precision", "inspect precision")
    command.refuse_views(heatmap=options.heatmap, layer=options.layer, run=options.run)
    request = fill(command.PrecisionRequest, options)
    priced = command.precision(
        model, request, store=store, device=options.device, threads=options.threads
    )
    command.show(priced, as_json=as_json)


def _price_prefetching(
    model: str | None, options: InspectOptions, *, store: Path, as_json: bool
) -> None:
    from moectl.shared.trace_source import TraceSource

    command = of_clone("tools.lab.prefetching", "inspect prefetch")
    command.refuse_views(heatmap=options.heatmap, layer=options.layer, model=model)
    source = fill(TraceSource, options, store=store)
    command.show(
        command.prefetching(source, fill(command.PrefetchRequest, options)), as_json=as_json
    )


def _check_store(model: str | None, options: InspectOptions, *, store: Path, as_json: bool) -> None:
    from moectl.commands.inspect import checking as command

    command.refuse_views(heatmap=options.heatmap, layer=options.layer, run=options.run)
    verified = command.verified(store, model=model)
    command.show(verified, as_json=as_json)
    raise typer.Exit(verified.exit_code)


def _show_view(
    name: str, model: str | None, options: InspectOptions, *, store: Path, as_json: bool
) -> None:
    from moectl.commands import inspect as command

    if name == "presets" and model is not None:
        command.show(command.preset(model, store), heatmap=options.heatmap, as_json=as_json)
        return
    command.refuse_model(name, model)
    view = command.inspect(name, store, run=options.run, layer=options.layer, verify=options.verify)
    if options.picture is not None:
        command.picture(view, options.picture)
        return
    command.show(view, heatmap=options.heatmap, as_json=as_json)

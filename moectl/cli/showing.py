"""Commands that show or hand on what a store holds: `inspect`, `report`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.app import app
from moectl.cli.options import DEFAULT_THREADS, AnyModel, Budget, Device, Json, RunId, Seed, StorePath, Threads, Window
from moectl.shared.defaults import DEFAULT_STORE


@app.command("inspect")
def _inspect(
    name: Annotated[
        str,
        typer.Argument(
            help="store, runs, activations, coactivation, entropy, similarity, buddies, quant-loss, replicas, curves, "
            "splits, maps, predictors, presets, policies, machines, substitution, precision or prefetch."
        ),
    ] = "store",
    model: AnyModel = None,
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    layer: Annotated[int | None, typer.Option(min=0, help="One layer in detail.")] = None,
    heatmap: Annotated[bool, typer.Option("--heatmap", help="A picture instead of a table.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Write that picture to this SVG file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Of store and replicas: read it all and compare.")] = False,
    data: Annotated[str, typer.Option(help="Held-out text, for substitution and precision.")] = "builtin:held-out",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of it.")] = 4096,
    draws: Annotated[int, typer.Option(min=1, help="Random draws: of resident experts, of widths.")] = 3,
    shares: Annotated[str, typer.Option(help="Shares of resident experts, for substitution.")] = "0.75,0.5,0.375",
    trace: Annotated[Path | None, typer.Option(help="For prefetch: a Parquet trace; else the store's.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer, of that trace.")] = None,
    distance: Annotated[int, typer.Option(min=1, help="For prefetch: up to so many layers ahead.")] = 3,
    budget: Budget = "25%",
    eviction: Annotated[str, typer.Option(help="For prefetch: what is evicted meanwhile.")] = "least_stale",
    window: Window = None,
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Show what a store holds, or what moectl knows, as a table or as a heatmap; or price substitution or few bits."""
    if picture is not None:
        from moectl.commands.inspect import refuse_picture
        from moectl.show.pictures import check_picture

        refuse_picture(name)
        check_picture(picture)
    if name == "substitution":
        from moectl.commands import substitution as pricing

        pricing.refuse_views(heatmap=heatmap, layer=layer)
        request = pricing.Request(data, tokens, draws, pricing.parse_shares(shares), seed)
        priced = pricing.substitution(model, request, store=store, run=run, device=device, threads=threads)
        pricing.show(priced, as_json=json)
        return
    if name == "precision":
        from moectl.commands import precision as bits

        bits.refuse_views(heatmap=heatmap, layer=layer, run=run)
        asked = bits.Request(data, tokens, draws, seed)
        bits.show(bits.precision(model, asked, store=store, device=device, threads=threads), as_json=json)
        return
    if name == "prefetch":
        from moectl.commands import prefetching
        from moectl.shared.trace_source import Source

        prefetching.refuse_views(heatmap=heatmap, layer=layer, model=model)
        source = Source(trace, run, num_experts=num_experts, store=store)
        wanted = prefetching.Request(distance=distance, budget=budget, eviction=eviction, window=window)
        prefetching.show(prefetching.prefetching(source, wanted), as_json=json)
        return
    if name == "store" and verify:
        from moectl.commands import checking

        checking.refuse_views(heatmap=heatmap, layer=layer, run=run, model=model)
        checking.show(found := checking.verified(store), as_json=json)
        raise typer.Exit(found.exit_code)
    from moectl.commands import inspect as verb

    verb.refuse_model(name, model)
    view = verb.inspect(name, store, run=run, layer=layer, verify=verify)
    if picture is not None:
        verb.picture(view, picture)
        return
    verb.show(view, heatmap=heatmap, as_json=json)


@app.command("report")
def _report(
    out: Annotated[Path, typer.Argument(help="The page to write, as report.html.")],
    store: StorePath = DEFAULT_STORE,
    run: Annotated[int | None, typer.Option("--run", min=1, help="A run: of its model, led by its bench.")] = None,
    json: Json = False,
) -> None:
    """Write what a store knows of a model as one HTML page: words, charts, tables, and the query of each."""
    from moectl.commands import report as verb

    verb.show(verb.report(out, store=store, run=run), as_json=json)


@app.command("export")
def _export(
    model: AnyModel = None,
    what: Annotated[
        str,
        typer.Option(
            help="gptq (a checkpoint: experts from their replicas, the rest as it is), buddies, splits, placement or "
            "profile (JSON), routing (CSV), override-tensor (an option of llama.cpp)."
        ),
    ] = "gptq",
    out: Annotated[Path | None, typer.Option(help="The file to write, else stdout; of gptq a new folder.")] = None,
    bits: Annotated[int, typer.Option(help="Of gptq: 2, 3 or 4.")] = 4,
    budget: Budget = "25%",
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    json: Json = False,
) -> None:
    """Write what a store holds for other programs."""
    from moectl.commands import export as verb

    if what != verb.GPTQ:
        text = verb.export_text(model, what, out, budget=budget, store=store, run=run)
        verb.show_text(text, as_json=json)
        return
    verb.show(verb.export(model, out, bits=bits, store=store, run=run), as_json=json)

"""`moectl build-maps`: run requests through the model and keep their iterations as expert maps
(fMoE)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import Data, EngineOptions, Json, Model, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing

if TYPE_CHECKING:
    from moectl.show.render import Sheet
    from profilers.routing.maps import BuiltMaps


@dataclass(frozen=True, slots=True)
class MapOptions:
    """The maps to keep, and the requests that they are made from."""

    capacity: Annotated[
        int, typer.Option(min=1, help="Maps to keep: later ones replace those most like them.")
    ] = 1000
    distance: Annotated[int, typer.Option(min=1, help="Layers ahead that a match is to guide.")] = 3
    data: Data = "builtin"
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of all requests together, at most.")
    ] = 16_384
    requests: Annotated[int | None, typer.Option(min=1, help="Requests, at most.")] = None
    length: Annotated[int, typer.Option(min=2, help="Tokens of a request, at most.")] = 128
    prefill: Annotated[
        int, typer.Option(min=0, help="Of them the prompt: one map; each further token has one.")
    ] = 64
    batch: Annotated[
        int, typer.Option(min=1, help="Requests at a time; an expert is loaded once for all.")
    ] = 16
    dtype: Annotated[
        str, typer.Option(help="float32, or float16: half the memory, slower to match.")
    ] = "float32"


def build_maps(
    *,
    model: Model = None,
    options: MapOptions,
    engine: EngineOptions,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Keep maps of past iterations, to prefetch by (fMoE).

    A map is what the routers said in one iteration; one that is like it is prefetched by it.
    """
    with importing():
        from moectl.shared.build_on_text import build_on_text
        from moectl.show.render import show_json, show_sheet
        from profilers.routing.maps import ExpertMapPlan
        from profilers.routing.maps import build_maps as builder
        from profilers.text.batches import Batching

    built = build_on_text(
        model,
        engine.settings(),
        builder,
        fill(Batching, options),
        fill(ExpertMapPlan, options),
        data=options.data,
        tokens=options.tokens,
        requests=options.requests,
        seed=seed,
        store=store,
        doing="running requests",
    )
    sheet = _sheet(built)
    if json:
        [record] = sheet.records()
        show_json(
            {
                "run": built.run_id,
                **record,
                "dtype": built.maps.dtype,
                "seconds": built.seconds,
                "shortfall": built.shortfall,
            }
        )
        return
    show_sheet(sheet)


def _sheet(built: "BuiltMaps") -> "Sheet":
    from moectl.show.render import NumBytes, Sheet, fewer

    maps = built.maps
    row = (
        len(maps),
        maps.capacity,
        maps.distance,
        built.num_requests,
        built.num_iterations,
        maps.num_replaced,
        NumBytes(maps.nbytes),
        NumBytes(maps.capacity * maps.map_nbytes),
    )
    columns = (
        "maps",
        "capacity",
        "distance",
        "requests",
        "iterations",
        "replaced",
        "bytes",
        "bytes when full",
    )
    note = (
        f"run {built.run_id}: {built.num_tokens:,} tokens in {built.seconds:.1f} "
        f"s{fewer(built.shortfall)}"
    )
    return Sheet("Expert maps", columns, [row], note)

"""The command line of `moectl build-maps`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import Data, EngineOptions, Json, Model, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


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
        from moectl.commands.build import build_maps as command
        from profilers.routing.maps import ExpertMapPlan
        from profilers.text.batches import Batching

    plan = fill(ExpertMapPlan, options)
    batching = fill(Batching, options)
    request = fill(command.BuildRequest, options, plan=plan, batching=batching, seed=seed)
    command.show(command.build(model, engine.settings(), request, store=store), as_json=json)

"""The command line of `moectl build-predictor`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import Data, EngineOptions, Json, Model, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


@dataclass(frozen=True, slots=True)
class PredictorOptions:
    """The predictors to fit, and the text that they are fitted and tested on."""

    distance: Annotated[
        int, typer.Option(min=1, help="Layers ahead to predict: each of 1 to this.")
    ] = 3
    features: Annotated[
        int, typer.Option(min=0, help="Random features beside a router's input; 0: linear.")
    ] = 512
    data: Data = "builtin"
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens; three tenths of them choose and test.")
    ] = 32_768
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences at a time; an expert is loaded once for all.")
    ] = 16


def build_predictor(
    *,
    model: Model = None,
    options: PredictorOptions,
    engine: EngineOptions,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Learn which experts layers ahead want, to prefetch by.

    From routers' inputs; tested on held-out text.
    """
    with importing():
        from moectl.commands.build import build_predictor as command
        from profilers.routing.predictors import PredictorPlan
        from profilers.text.batches import Batching

    plan = fill(PredictorPlan, options)
    batching = fill(Batching, options, prefill=0)
    request = fill(command.BuildRequest, options, plan=plan, batching=batching, seed=seed)
    command.show(command.build(model, engine.settings(), request, store=store), as_json=json)

"""`moectl build-predictor`: learn from routers' inputs which experts later layers select
(ProMoE)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import Data, EngineOptions, Json, Length, Model, Seed, Sequences, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing

if TYPE_CHECKING:
    from profilers.routing.predictors import FittedPredictors


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
    length: Length = 256
    batch: Sequences = 16


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
        from moectl.shared.build_on_text import build_on_text
        from profilers.routing.predictors import PredictorPlan, build_predictors
        from profilers.text.batches import Batching

    fitted = build_on_text(
        model,
        engine.settings(),
        build_predictors,
        fill(Batching, options, prefill=0),
        fill(PredictorPlan, options),
        data=options.data,
        tokens=options.tokens,
        seed=seed,
        store=store,
        doing="running text",
    )
    _show(fitted, as_json=json)


def _show(fitted: "FittedPredictors", *, as_json: bool) -> None:
    """Print the recall of the predictors by layer and by distance, or one JSON object."""
    from moectl.show.predictor_recall import distances, layers
    from moectl.show.render import fewer, human_bytes, show_json, show_sheet

    note = (
        f"run {fitted.run_id}: {fitted.num_tokens:,} tokens in {fitted.seconds:.1f} s, "
        f"{fitted.num_tested:,} of them only to test on; {human_bytes(fitted.predictors.nbytes)} "
        f"of predictors{fewer(fitted.shortfall)}"
    )
    by_distance = distances(fitted.recalls, note=note)
    by_layer = layers(fitted.recalls, fitted.target)
    if as_json:
        show_json(
            {
                "run": fitted.run_id,
                "tokens": fitted.num_tokens,
                "tested_tokens": fitted.num_tested,
                "seconds": fitted.seconds,
                "shortfall": fitted.shortfall,
                "nbytes": fitted.predictors.nbytes,
                "distances": by_distance.records(),
                "layers": by_layer.records(),
            }
        )
        return
    show_sheet(by_layer)
    show_sheet(by_distance)

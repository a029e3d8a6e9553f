"""`moectl build-predictor`: learn from routers' inputs which experts later layers select
(ProMoE)."""

from pathlib import Path

from moectl.shared.build_on_text import BuildRequest, build_on_text
from moectl.show import predictors as predictorviews
from moectl.show.render import Sheet, fewer, human_bytes, show_json, show_sheet
from profilers.routing.predictors import FittedPredictors, PredictorPlan, build_predictors
from runtime.session.settings import Settings


def build(
    name: str | None, settings: Settings, request: BuildRequest[PredictorPlan], *, store: Path
) -> FittedPredictors:
    """Run the model `name` (None: the bundled one) over the text, and write predictors fitted and
    tested on it.

    Raises BadUsage (distance, features), BadInput (model, data, store) and OutOfResources (disk).
    """
    return build_on_text(
        name, settings, request, build_predictors, store=store, doing="running text"
    )


def show(fitted: FittedPredictors, *, as_json: bool) -> None:
    """Print the recall of the predictors by distance and by layer."""
    sheet = summary(fitted)
    if as_json:
        show_json(
            {
                "run": fitted.run_id,
                "tokens": fitted.num_tokens,
                "tested_tokens": fitted.num_tested,
                "seconds": fitted.seconds,
                "shortfall": fitted.shortfall,
                "nbytes": fitted.predictors.nbytes,
                "distances": sheet.records(),
                "layers": predictorviews.layers(fitted.recalls, fitted.target).records(),
            }
        )
        return
    show_sheet(predictorviews.layers(fitted.recalls, fitted.target))
    show_sheet(sheet)


def summary(fitted: FittedPredictors) -> Sheet:
    note = (
        f"run {fitted.run_id}: {fitted.num_tokens:,} tokens in {fitted.seconds:.1f} s, "
        f"{fitted.num_tested:,} of them only to test on; {human_bytes(fitted.predictors.nbytes)} "
        f"of predictors{fewer(fitted.shortfall)}"
    )
    return predictorviews.distances(fitted.recalls, note=note)

"""`moectl build-predictor`: what routers will say layers ahead, learned from their inputs (ProMoE's place)."""

from dataclasses import dataclass
from pathlib import Path

from moectl.bundled import demo_model
from moectl.commands.profile import Request as Text
from moectl.commands.profile import read_data
from moectl.shared.opening import check_store, model_info, open_quietly
from moectl.shared.progress import progress_bar
from moectl.show import predictors as predictorviews
from moectl.show.render import Sheet, human_bytes, show_json, show_sheet
from profilers.routing.predictors import Fitted, Plan, build_predictors
from profilers.text.batches import Batching
from profilers.text.corpus import documents
from runtime.session.session import Session, Settings


@dataclass(frozen=True, slots=True)
class Request:
    """The predictors that are asked for, and the text that they are fitted and tested on."""

    plan: Plan
    data: str
    tokens: int
    batching: Batching
    seed: int = 0


def build(name: str | None, settings: Settings, request: Request, *, store: Path) -> Fitted:
    """Run the model `name`, a folder or hub id (None: the bundled one), at its budget, and write its predictors.

    Raises BadUsage (distance, features), BadInput (model, data, store) and OutOfResources (disk).
    """
    name = name or str(demo_model())
    check_store(store)
    documents(request.data)  # what leads nowhere is told before a model is opened
    with Session(open_quietly(name, device=settings.device), settings) as session:
        data = read_data(session.opened, Text(request.data, request.tokens, request.batching, seed=request.seed))
        with progress_bar("running text", unit="tokens") as advance:
            return build_predictors(
                session,
                data,
                request.batching,
                request.plan,
                model=model_info(name, session.opened),
                store_path=store,
                progress=advance,
            )


def show(fitted: Fitted, *, as_json: bool) -> None:
    """Print how much of what came was foreseen, by distance and by layer."""
    sheet = summary(fitted)
    if as_json:
        show_json(
            {
                "run": fitted.run_id,
                "tokens": fitted.num_tokens,
                "tested_tokens": fitted.num_tested,
                "seconds": fitted.seconds,
                "nbytes": fitted.predictors.nbytes,
                "distances": sheet.records(),
                "layers": predictorviews.layers(fitted.recalls, fitted.target).records(),
            }
        )
        return
    show_sheet(predictorviews.layers(fitted.recalls, fitted.target))
    show_sheet(sheet)


def summary(fitted: Fitted) -> Sheet:
    note = (
        f"run {fitted.run_id}: {fitted.num_tokens:,} tokens in {fitted.seconds:.1f} s, {fitted.num_tested:,} of them "
        f"only to test on; {human_bytes(fitted.predictors.nbytes)} of predictors"
    )
    return predictorviews.distances(fitted.recalls, note=note)

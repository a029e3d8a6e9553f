"""Read fitted predictors from a store."""

from typing import TYPE_CHECKING

from artifacts.routing.predictors import COMMAND, TABLE, Predictors, predictors_of
from artifacts.shape import Shape
from artifacts.store.runs import as_written

if TYPE_CHECKING:
    from artifacts.store.store import Store


def load_predictors(store: "Store", model_id: str, shape: Shape) -> Predictors | None:
    """The predictors of the newest run of this model; None if there is none. Raises BadInput when
    they are damaged."""
    run = store.latest_run(COMMAND, model_id)
    if run is None:
        return None
    parameters = run.info.parameters
    rows = store.read(TABLE, run.run_id)
    with as_written(run, store.path):
        num_features = int(parameters["features"])
    return predictors_of(rows, shape, num_features=num_features, seed=run.info.seed)

"""Access to a store that commands share. Importing this module imports duckdb: a command that can
do without a store imports it where it is used."""

import sys
from pathlib import Path

from artifacts.errors import BadUsage
from artifacts.shape import FULL_BITS
from artifacts.store.predictors import load_predictors
from artifacts.store.store import Store
from moectl.shared.defaults import users_store
from profilers.routing.observe import RoutingForesight
from runtime.engine.fitted_predictor import Predictor
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.session.artefacts import load_artefacts


def check_store(path: Path) -> None:
    """Raise now what would otherwise prevent writing at the end: no folder, not a store, another
    writer. The folder of the user's store is made, and said once."""
    if path == users_store() and not path.parent.exists():
        path.parent.mkdir(parents=True)
        print(f"What moectl measures and builds is kept in {path} (--store FILE)", file=sys.stderr)
    with Store.open(path):
        pass


def stored_artefacts(path: Path, opened: MoeModel, *, base: int = FULL_BITS) -> Artefacts:
    """Load the model's artefacts from the store, with replicas that have the width of the base;
    none when there is no store."""
    if not path.exists():
        return Artefacts()
    with Store.open(path, read_only=True) as store:
        return load_artefacts(store, opened.fingerprint[:16], opened.shape, base=base)


def foresight_for(opened: MoeModel, distance: int, *, store: Path) -> RoutingForesight:
    """Return what a trace records of the `distance` layers ahead; the store's predictors speak too
    if it has any.

    Raises BadUsage for a distance beyond the model's layers.
    """
    if distance > opened.shape.num_layers:
        raise BadUsage(
            f"the distance must be 1 to {opened.shape.num_layers}, the model's MoE layers, not "
            f"{distance}"
        )
    with Store.open(store) as opened_store:
        predictors = load_predictors(opened_store, opened.fingerprint[:16], opened.shape)
    if predictors is None:
        return RoutingForesight(distance, None)
    return RoutingForesight(
        distance, Predictor(predictors, min(distance, predictors.distance), opened.model.device)
    )

"""Read hardware profiles from a store."""

from typing import TYPE_CHECKING

from artifacts.errors import Incompatible
from artifacts.hardware.profile import COMMAND, REMEDY, HardwareProfile, from_rows
from artifacts.shape import Shape
from artifacts.store.runs import StoredRun

if TYPE_CHECKING:
    from artifacts.store.store import Store


def stored_profile(store: "Store", model_id: str) -> HardwareProfile | None:
    """The newest hardware profile of a model; None if there is none."""
    run = store.latest_run(COMMAND, model_id)
    return None if run is None else _read(store, run)


def profile_for(store: "Store", shape: Shape, *, name: str) -> HardwareProfile:
    """The newest hardware profile of a model of this shape; `name` is how a message calls the
    model. Raises Incompatible when there is none."""
    shapes = {model.model_id: model.shape for model in store.models()}
    runs = store.runs(command=COMMAND)
    for run in reversed(runs):
        if shapes[run.info.model_id] == shape:
            return _read(store, run)
    what = "hardware profiles of models of other shapes only" if runs else "no hardware profile"
    raise Incompatible(
        f"{store.path} holds {what}, and seconds are those of one model: {REMEDY} with {name}"
    )


def _read(store: "Store", run: StoredRun) -> HardwareProfile:
    return from_rows(store.read("hardware", run.run_id), run.info.parameters)

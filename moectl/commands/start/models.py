"""`moectl models`: the models on this machine that can be opened, wherever a program keeps them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from artifacts.errors import BadInput
from moectl.cli.options import Json

if TYPE_CHECKING:
    from moectl.show.render import Sheet
    from runtime.model.files.hub.kept import KeptModel


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model on this machine, by the name that opens it. `format` is that of its experts; empty
    for a model that does not open, with the reason in `refused`."""

    name: str
    nbytes: int
    format: str
    where: str
    path: str
    refused: str = ""


def models(*, json: Json = False) -> None:
    """List the models on this machine that moectl opens.

    They are looked for in the hub's cache, and where LM Studio and Ollama keep theirs.
    """
    from moectl.show.render import show_json, show_sheet
    from runtime.model.files.hub.kept import kept_models

    found = [_listed(model) for model in kept_models()]
    if json:
        show_json({"models": [asdict(model) for model in found]})
        return
    show_sheet(_sheet(found))


def _listed(model: "KeptModel") -> ListedModel:
    from moectl.shared.glance import glance

    place = model.where, str(model.path)
    try:
        seen = glance(str(model.path))
    except BadInput as error:
        return ListedModel(model.name, model.nbytes, "", *place, str(error))
    return ListedModel(model.name, model.nbytes, seen.expert_format, *place, seen.unknown)


def _sheet(found: Iterable[ListedModel]) -> "Sheet":
    from moectl.show.render import NumBytes, Sheet

    opened = [model for model in found if not model.refused]
    num_others = sum(1 for model in found if model.refused)
    rows = [(model.name, NumBytes(model.nbytes), model.format, model.where) for model in opened]
    notes = [
        "none is here: `moectl run owner/name` downloads one" * (not rows),
        f"{num_others} others do not open: --json has the reasons" * bool(num_others),
    ]
    columns = ("model", "size", "experts", "where")
    return Sheet("Models on this machine", columns, rows, "; ".join(filter(None, notes)))

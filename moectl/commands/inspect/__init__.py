"""`moectl inspect`: what a store holds and what moectl knows, as tables, heatmaps or JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.store.store import Store
from moectl.commands.inspect.artefacts import ARTEFACTS, find_artefact
from moectl.commands.inspect.knowledge import KNOWLEDGE, one_preset, presets_in_brief
from moectl.show import store as store_views
from moectl.show.render import (
    Heatmap,
    Sheet,
    console,
    draw_heatmap,
    human_bytes,
    show_heatmap,
    show_json,
    show_sheet,
)


@dataclass(frozen=True, slots=True)
class View:
    """Contents to show under a name.

    `sheets` are tables by their key in JSON, and `facts` stand in JSON alone. `brief`, if any, are
    the tables that are printed in place of `sheets`.
    """

    name: str
    sheets: Mapping[str, Sheet]
    heatmap: Heatmap | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    brief: Sequence[Sheet] = ()


def inspect(
    name: str, store: Path, *, run: int | None, layer: int | None, verify: bool = False
) -> View:
    """Return the view of a name; with `verify`, replica files are read and compared with their
    hashes.

    Raises BadUsage (unknown name or layer), BadInput (store, replica files) and Incompatible
    (store).
    """
    if verify and name != "replicas":
        raise BadUsage(
            f"--verify reads what is on the disk: it goes with store and replicas, not with {name}"
        )
    if name in KNOWLEDGE:
        brief = presets_in_brief(store) if name == "presets" else ()
        return View(name, {"rows": KNOWLEDGE[name](store)}, brief=brief)
    if name not in _STORED and name not in ARTEFACTS:
        raise BadUsage(unknown("name", name, (*_STORED, *ARTEFACTS, *KNOWLEDGE, *_MEASURED)))
    with Store.open(store, read_only=True) as opened:
        if name in _STORED:
            return View(
                name, _STORED[name](opened), facts={"store": str(store), "nbytes": opened.nbytes}
            )
        table, look = ARTEFACTS[name]
        artefact = find_artefact(opened, table, run, layer, verify=verify)
        sheet, heatmap = look(artefact)
        return View(name, {"rows": sheet}, heatmap, {"run": artefact.run.run_id})


def preset(name: str, store: Path) -> View:
    """Return the view of one preset. Raises BadUsage for an unknown name."""
    row, told = one_preset(name, store)
    return View("presets", {"rows": row}, brief=[told])


def refuse_model(name: str, model: str | None) -> None:
    """Raise BadUsage for a model: these views come from the store alone."""
    if model is not None:
        raise BadUsage(f"inspect {name} reads no model: leave {model} out")


def refuse_picture(name: str) -> None:
    """Raise BadUsage for a name that has no heatmap, and so no picture."""
    if name not in ARTEFACTS:
        raise BadUsage(f"{name} has no picture; {', '.join(ARTEFACTS)} have one")


def picture(view: View, path: Path) -> None:
    """Write the view's heatmap as a picture and print its path."""
    draw_heatmap(view.heatmap, path)
    console().print(f"{path}: {view.heatmap.title}", markup=False)


def show(view: View, *, heatmap: bool, as_json: bool) -> None:
    """Print a view. Raises BadUsage when a heatmap is asked for and the view has none."""
    if as_json:
        show_json(_record(view))
    elif not heatmap:
        for sheet in view.brief or view.sheets.values():
            show_sheet(sheet)
    elif view.heatmap is None:
        raise BadUsage(f"{view.name} has no heatmap; {', '.join(ARTEFACTS)} have one")
    else:
        show_heatmap(view.heatmap)


def _record(view: View) -> dict[str, object]:
    sheets = {key: sheet.records() for key, sheet in view.sheets.items()}
    matrix = {} if view.heatmap is None else {"matrix": view.heatmap.values}
    return {"name": view.name, **view.facts, **sheets, **matrix}


def _store(store: Store) -> dict[str, Sheet]:
    title = f"{store.path}: {human_bytes(store.nbytes)} on disk"
    return {
        "models": store_views.models(store.models()),
        **_runs(store),
        "artefacts": store_views.artefacts(store.sizes(), title=title),
    }


def _runs(store: Store) -> dict[str, Sheet]:
    return {"runs": store_views.runs(store.runs(), store.models())}


_STORED: dict[str, Callable[[Store], dict[str, Sheet]]] = {"store": _store, "runs": _runs}
_MEASURED = (
    "substitution",
    "precision",
    "prefetch",
)  # each by a study in tools/lab

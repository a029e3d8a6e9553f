"""`moectl inspect`: what a store holds and what moectl knows, as tables, heatmaps or JSON."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pyarrow as pa

from artifacts.common.suggestions import unknown
from artifacts.common.untrusted import inside
from artifacts.errors import BadInput, BadUsage, Incompatible
from artifacts.hardware.machines import MACHINES
from artifacts.quantisation import replica_file as replicafile
from artifacts.shape import Shape
from artifacts.store import rows as matrices
from artifacts.store.expert_maps import map_arrays
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from moectl.show import (
    maps as mapviews,
)
from moectl.show import (
    predictors as predictorviews,
)
from moectl.show import (
    replicas as replicaviews,
)
from moectl.show import (
    splits as splitviews,
)
from moectl.show import (
    store as views,
)
from moectl.show.render import Heatmap, Sheet, console, human_bytes, show_heatmap, show_json, show_sheet
from runtime.policies import POLICIES, build
from runtime.policies.presets import presets
from runtime.session.presets import tuned_presets


@dataclass(frozen=True, slots=True)
class View:
    """What there is to see under a name: sheets by the key they have in JSON, and facts that only JSON needs."""

    name: str
    sheets: Mapping[str, Sheet]
    heatmap: Heatmap | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Artefact:
    """An artefact in an open store: the run that wrote it, the shape of its model, and the layer asked for."""

    store: Store
    run: StoredRun
    shape: Shape
    layer: int | None
    verify: bool = False

    def read(self, table: str) -> pa.Table:
        return self.store.read(table, self.run.run_id)

    @property
    def size(self) -> tuple[int, int]:
        return self.shape.num_layers, self.shape.num_experts


def inspect(name: str, store: Path, *, run: int | None, layer: int | None, verify: bool = False) -> View:
    """What `name` stands for; with `verify`, replica files are read and compared with what was written.

    Raises BadUsage (unknown name or layer), BadInput (store, replica files) and Incompatible (store).
    """
    if verify and name != "replicas":
        raise BadUsage(f"--verify reads what is on the disk: it goes with store and replicas, not with {name}")
    if name in _KNOWLEDGE:
        return View(name, {"rows": _KNOWLEDGE[name](store)})
    if name not in _STORED and name not in _ARTEFACTS:
        known = (*_STORED, *_ARTEFACTS, *_KNOWLEDGE, "substitution", "precision", "prefetch")
        raise BadUsage(unknown("name", name, known))
    with Store.open(store, read_only=True) as opened:
        if name in _STORED:
            return View(name, _STORED[name](opened), facts={"store": str(store), "nbytes": opened.nbytes})
        table, look = _ARTEFACTS[name]
        artefact = replace(_find(opened, table, run, layer), verify=verify)
        sheet, heatmap = look(artefact)
        return View(name, {"rows": sheet}, heatmap, {"run": artefact.run.run_id})


def refuse_model(name: str, model: str | None) -> None:
    """Raise BadUsage for a model where none is read: what is shown comes from the store."""
    if model is not None:
        raise BadUsage(f"inspect {name} reads no model: leave {model} out")


def refuse_picture(name: str) -> None:
    """Raise BadUsage for what has no heatmap, and so no picture."""
    if name not in _ARTEFACTS:
        raise BadUsage(f"{name} has no picture; {', '.join(_ARTEFACTS)} have one")


def picture(view: View, path: Path) -> None:
    """Write the view's heatmap as a picture and say so."""
    from moectl.show.pictures import draw_heatmap

    draw_heatmap(view.heatmap, path)
    console().print(f"{path}: {view.heatmap.title}", markup=False)


def show(view: View, *, heatmap: bool, as_json: bool) -> None:
    """Print a view. Raises BadUsage when a heatmap is asked for and there is none."""
    if as_json:
        show_json(_record(view))
    elif not heatmap:
        for sheet in view.sheets.values():
            show_sheet(sheet)
    elif view.heatmap is None:
        raise BadUsage(f"{view.name} has no heatmap; {', '.join(_ARTEFACTS)} have one")
    else:
        show_heatmap(view.heatmap)


def _record(view: View) -> dict[str, object]:
    sheets = {key: sheet.records() for key, sheet in view.sheets.items()}
    matrix = {} if view.heatmap is None else {"matrix": view.heatmap.values}
    return {"name": view.name, **view.facts, **sheets, **matrix}


def _find(store: Store, table: str, run_id: int | None, layer: int | None) -> Artefact:
    """The newest run that wrote the table, or the one asked for."""
    candidates = store.runs() if run_id is None else [store.run(run_id)]
    found = [run for run in candidates if table in run.contents]
    if not found:
        where = store.path if run_id is None else f"run {run_id} of {store.path}"
        raise Incompatible(f"{where} holds no {table}; moectl inspect runs lists what there is")
    shape = _shape(store, found[-1])
    if layer is not None and layer >= shape.num_layers:
        raise BadUsage(f"there is no layer {layer}: the model's MoE layers are 0 to {shape.num_layers - 1}")
    return Artefact(store, found[-1], shape, layer)


def _shape(store: Store, run: StoredRun) -> Shape:
    """Of the run's model; a split may be of a model of which only the shape is known."""
    known = {model.model_id: model.shape for model in store.models()}
    return known[run.info.model_id] if run.info.model_id else Shape(**run.info.parameters["shape"])


def _store(store: Store) -> dict[str, Sheet]:
    return {
        "models": views.models(store.models()),
        **_runs(store),
        "artefacts": views.artefacts(store.sizes(), title=f"{store.path}: {human_bytes(store.nbytes)} on disk"),
    }


def _runs(store: Store) -> dict[str, Sheet]:
    return {"runs": views.runs(store.runs(), store.models())}


def _activations(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    by_phase = matrices.activation_matrices(artefact.read("activations"), *artefact.size)
    return views.activations(by_phase, artefact.shape, artefact.layer), views.activations_heatmap(by_phase)


def _coactivation(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    pairs, weighted = matrices.coactivation_matrices(artefact.read("coactivations"), *artefact.size)
    return views.coactivation(pairs, weighted, artefact.layer), views.coactivation_heatmap(pairs, artefact.layer)


def _entropy(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    percentiles = matrices.entropy_percentiles(artefact.read("entropy"))
    return views.entropy(percentiles, artefact.layer), views.entropy_heatmap(percentiles)


def _similarity(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    similarity = matrices.similarity_matrices(artefact.read("similarity"), *artefact.size)
    return views.similarity(similarity, artefact.layer), views.similarity_heatmap(similarity, artefact.layer)


def _buddies(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    table, q = matrices.buddy_matrices(artefact.read("buddies"), *artefact.size)
    alphas = artefact.run.info.parameters["alpha"]
    layer = artefact.layer
    sheet = views.buddy_sizes(table, q, alphas) if layer is None else views.buddies(table, q, layer)
    return sheet, views.buddies_heatmap(table, q, layer)


def _quant_loss(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    rows = artefact.read("quant_loss")
    sheet = replicaviews.quant_loss(rows, artefact.size, artefact.layer)
    return sheet, replicaviews.quant_loss_heatmap(rows, artefact.size)


def _replicas(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    rows = artefact.read("replicas")
    if artefact.verify:
        _verify(artefact.store.path, rows)
    sheet = replicaviews.replicas(rows, artefact.layer, verified=artefact.verify)
    return sheet, replicaviews.replicas_heatmap(rows, artefact.size)


def _verify(store: Path, rows: pa.Table) -> None:
    """Raise BadInput, with the first, when a file is damaged, replaced or missing."""
    hashes = dict(zip(rows["file"].to_pylist(), rows["hash"].to_pylist(), strict=True))
    problems = []
    for file, hash in hashes.items():
        try:
            replicafile.verify(inside(replicafile.replica_root(store), file), hash)
        except BadInput as problem:
            problems.append(problem)
    if problems:
        raise BadInput(f"{len(problems)} of {len(hashes)} replica files cannot be used; the first: {problems[0]}")


def _curves(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    found = matrices.curve_matrices(artefact.read("curves"), *artefact.size)
    return splitviews.curves(found, artefact.layer), splitviews.curves_heatmap(found, artefact.layer)


def _splits(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    answer = matrices.split_columns(artefact.read("splits"))
    found = matrices.curve_matrices(artefact.read("curves"), *artefact.size)
    asked = artefact.run.info.parameters
    title = f"Split of {asked['model']}, {asked['budget']}, {asked.get('machine', 'measured')}, {asked['solver']}"
    sheet = splitviews.splits(answer, found, title=title)
    return splitviews.with_bars(sheet, artefact.shape.num_experts), splitviews.splits_heatmap(
        answer, artefact.shape.num_experts
    )


def _maps(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    _, probabilities = map_arrays(artefact.read("expert_maps"), artefact.shape)
    sheet = mapviews.maps(probabilities, artefact.shape.top_k, artefact.layer)
    return sheet, mapviews.maps_heatmap(probabilities)


def _predictors(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    shape = artefact.shape
    share = shape.top_k / shape.num_experts
    recalls, target = predictorviews.stored(artefact.read("predictors"), shape.num_layers, share)
    if artefact.layer is None:
        return predictorviews.distances(recalls), predictorviews.heatmap(recalls)
    at = slice(artefact.layer, artefact.layer + 1)
    sheet = predictorviews.layers({name: values[at] for name, values in recalls.items()}, target[at])
    return replace(sheet, rows=[(artefact.layer, *row[1:]) for row in sheet.rows]), predictorviews.heatmap(recalls)


def _presets(store: Path) -> Sheet:
    """Those that come with moectl, then what was tuned into the store."""
    columns = ("preset", *POLICIES, "scope", "needs", "waits for", "paper", "summary", "not as published", "tuned for")
    rows = [
        (
            preset.name,
            *preset.texts().values(),
            preset.scope,
            ", ".join(sorted(build(preset.texts()).requires)) or None,
            preset.waits_for or None,
            preset.paper,
            preset.summary,
            preset.differs or None,
            preset.tuned_for or None,
        )
        for preset in (*presets().values(), *tuned_presets(store))
    ]
    note = "What waits for something cannot run yet; what needs replicas runs after `moectl quantize`."
    return Sheet("Presets", columns, rows, note)


def _policies(store: Path) -> Sheet:
    rows = [
        (
            axis,
            name,
            ", ".join(f"{parameter.name}={parameter.default}" for parameter in fields(kind)) or "-",
            _summary(kind),
        )
        for axis, kinds in POLICIES.items()
        for name, kind in kinds.items()
    ]
    return Sheet("Policies", ("axis", "policy", "parameters", "what it does"), rows)


def _summary(kind: type) -> str:
    """What the policy's file says of itself."""
    return (sys.modules[kind.__module__].__doc__ or "-").strip().split("\n\n")[0].replace("\n", " ")


def _machines(store: Path) -> Sheet:
    columns = (
        "machine",
        "fast GB/s",
        "fast TFLOPS",
        "link GB/s",
        "link latency us",
        "near GB/s",
        "near TFLOPS",
        "source",
    )
    rows = [
        (
            name,
            machine.fast_gbps,
            machine.fast_tflops,
            machine.link_gbps,
            machine.link_latency_s * 1e6,
            machine.near_gbps,
            machine.near_tflops if math.isfinite(machine.near_tflops) else None,
            machine.source,
        )
        for name, machine in MACHINES.items()
    ]
    return Sheet("Machines", columns, rows)


_STORED: dict[str, Callable[[Store], dict[str, Sheet]]] = {"store": _store, "runs": _runs}
_ARTEFACTS: dict[str, tuple[str, Callable[[Artefact], tuple[Sheet, Heatmap]]]] = {
    "activations": ("activations", _activations),
    "coactivation": ("coactivations", _coactivation),
    "entropy": ("entropy", _entropy),
    "similarity": ("similarity", _similarity),
    "buddies": ("buddies", _buddies),
    "quant-loss": ("quant_loss", _quant_loss),
    "replicas": ("replicas", _replicas),
    "curves": ("curves", _curves),
    "splits": ("splits", _splits),
    "maps": ("expert_maps", _maps),
    "predictors": ("predictors", _predictors),
}
_KNOWLEDGE: dict[str, Callable[[Path], Sheet]] = {"presets": _presets, "policies": _policies, "machines": _machines}

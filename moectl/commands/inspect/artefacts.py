"""Artefacts of a store as tables and heatmaps, one function for each kind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from artifacts.common.untrusted import inside
from artifacts.errors import BadInput, BadUsage
from artifacts.hardware.machines import HERE
from artifacts.shape import Shape
from artifacts.store import rows as matrices
from artifacts.store.expert_maps import map_arrays
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from moectl.show import grounds, predictor_recall
from moectl.show import maps as map_views
from moectl.show import replicas as replica_views
from moectl.show import splits as split_views
from moectl.show import store as store_views
from moectl.show.render import Heatmap, Sheet, human_bytes


@dataclass(frozen=True, slots=True)
class Artefact:
    """An artefact in an open store: the run that wrote it, the shape of its model, and the layer
    asked for."""

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


def find_artefact(
    store: Store, table: str, run_id: int | None, layer: int | None, *, verify: bool
) -> Artefact:
    """Return the artefact of the run asked for, else of the newest run that wrote the table.

    Raises Incompatible when no run wrote it, BadUsage for a layer that the model does not have.
    """
    lacks = f"{table}; moectl inspect runs lists what there is"
    run = store.run_with(table, run_id, lacks=lacks)
    shape = _shape(store, run)
    if layer is not None and layer >= shape.num_layers:
        raise BadUsage(
            f"there is no layer {layer}: the model's MoE layers are 0 to {shape.num_layers - 1}"
        )
    return Artefact(store, run, shape, layer, verify)


def _shape(store: Store, run: StoredRun) -> Shape:
    """Return the shape of the run's model; a split keeps its own when the store does not hold its
    model."""
    shapes = {model.model_id: model.shape for model in store.models()}
    return shapes[run.info.model_id] if run.info.model_id else Shape(**run.info.parameters["shape"])


def activations(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    by_phase = matrices.activation_matrices(artefact.read("activations"), *artefact.size)
    return store_views.activations(
        by_phase, artefact.shape, artefact.layer
    ), store_views.activations_heatmap(by_phase)


def coactivation(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    layer = artefact.layer
    pairs, weighted = matrices.coactivation_matrices(artefact.read("coactivations"), *artefact.size)
    return store_views.coactivation(pairs, weighted, layer), store_views.coactivation_heatmap(
        pairs, layer
    )


def entropy(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    percentiles = matrices.entropy_percentiles(artefact.read("entropy"))
    return store_views.entropy(percentiles, artefact.layer), store_views.entropy_heatmap(
        percentiles
    )


def similarity(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    layer = artefact.layer
    measured = matrices.similarity_matrices(artefact.read("similarity"), *artefact.size)
    return store_views.similarity(measured, layer), store_views.similarity_heatmap(measured, layer)


def buddies(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    table, q = matrices.buddy_matrices(artefact.read("buddies"), *artefact.size)
    alphas = artefact.run.info.parameters["alpha"]
    layer = artefact.layer
    sheet = (
        store_views.buddy_sizes(table, q, alphas)
        if layer is None
        else store_views.buddies(table, q, layer)
    )
    return sheet, store_views.buddies_heatmap(table, q, layer)


def quant_loss(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    rows = artefact.read("quant_loss")
    sheet = replica_views.quant_loss(rows, artefact.size, artefact.layer)
    return sheet, replica_views.quant_loss_heatmap(rows, artefact.size)


def replicas(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    rows = artefact.read("replicas")
    if artefact.verify:
        _verify(artefact.store.path, rows)
    stored_as = artefact.run.info.parameters.get("expert_format", "in its own format")
    checkpoint = f"{human_bytes(artefact.shape.expert_nbytes)}, {stored_as}"
    sheet = replica_views.replicas(
        rows, artefact.layer, verified=artefact.verify, checkpoint=checkpoint
    )
    return sheet, replica_views.replicas_heatmap(rows, artefact.size)


def _verify(store: Path, rows: pa.Table) -> None:
    """Raise BadInput, naming the first, when replica files are damaged, replaced or missing."""
    from artifacts.quantisation import replica_file  # imports torch, which no other table needs

    hashes = dict(zip(rows["file"].to_pylist(), rows["hash"].to_pylist(), strict=True))
    problems = []
    for file, hash in hashes.items():
        try:
            replica_file.verify(inside(replica_file.replica_root(store), file), hash)
        except BadInput as problem:
            problems.append(problem)
    if problems:
        raise BadInput(
            f"{len(problems)} of {len(hashes)} replica files cannot be used; the first: "
            f"{problems[0]}"
        )


def curves(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    measured = matrices.curve_matrices(artefact.read("curves"), *artefact.size)
    return split_views.curves(measured, artefact.layer), split_views.curves_heatmap(
        measured, artefact.layer
    )


def splits(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    answer = matrices.split_columns(artefact.read("splits"))
    measured = matrices.curve_matrices(artefact.read("curves"), *artefact.size)
    asked = artefact.run.info.parameters
    title = (
        f"Split of {asked['model']}, {asked['budget']}, {asked.get('machine', 'measured')}, "
        f"{asked['solver']}"
    )
    on = grounds.simulated(asked.get("machine", HERE), artefact.shape.nbytes)
    sheet = split_views.splits(answer, measured, on, title=title)
    num_experts = artefact.shape.num_experts
    return split_views.with_bars(sheet, num_experts), split_views.splits_heatmap(
        answer, num_experts
    )


def maps(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    _, probabilities = map_arrays(artefact.read("expert_maps"), artefact.shape)
    sheet = map_views.maps(probabilities, artefact.shape.top_k, artefact.layer)
    return sheet, map_views.maps_heatmap(probabilities)


def predictors(artefact: Artefact) -> tuple[Sheet, Heatmap]:
    shape = artefact.shape
    share = shape.top_k / shape.num_experts
    recalls, target = predictor_recall.stored(artefact.read("predictors"), shape.num_layers, share)
    sheet = (
        predictor_recall.distances(recalls)
        if artefact.layer is None
        else predictor_recall.layers(recalls, target, artefact.layer)
    )
    return sheet, predictor_recall.heatmap(recalls)


ARTEFACTS: dict[str, tuple[str, Callable[[Artefact], tuple[Sheet, Heatmap]]]] = {
    "activations": ("activations", activations),
    "coactivation": ("coactivations", coactivation),
    "entropy": ("entropy", entropy),
    "similarity": ("similarity", similarity),
    "buddies": ("buddies", buddies),
    "quant-loss": ("quant_loss", quant_loss),
    "replicas": ("replicas", replicas),
    "curves": ("curves", curves),
    "splits": ("splits", splits),
    "maps": ("expert_maps", maps),
    "predictors": ("predictors", predictors),
}
"""By the name that `moectl inspect` takes: the table of the store, and the function that shows
it."""

"""Artefacts out of the store, as policies want them."""

from collections.abc import Collection

import numpy as np

from artifacts.common.untrusted import inside
from artifacts.errors import BadInput, Incompatible
from artifacts.hardware.machines import HERE
from artifacts.quantisation.bit_allocation import WIDTHS
from artifacts.quantisation.replica_file import replica_root
from artifacts.quantisation.replicas import Replicas, in_memory, passed_on
from artifacts.routing.similarity import Similarity
from artifacts.shape import FULL_BITS, Shape
from artifacts.splits.slots_by_layer import loads_on_demand
from artifacts.splits.solve import Latencies, SolvedSplit
from artifacts.store.expert_maps import latest_maps, stored_maps
from artifacts.store.predictors import load_predictors
from artifacts.store.rows import (
    buddy_matrices,
    curve_matrices,
    entropy_percentiles,
    quant_loss_matrices,
    similarity_matrices,
    split_columns,
)
from artifacts.store.runs import StoredRun, as_written
from artifacts.store.store import Store
from runtime.policies.base import Artefacts

_PRIOR_USE = 0.02  # of the layer's mean


def load_artefacts(store: Store, model_id: str, shape: Shape, *, wants: Collection[str] | None = None) -> Artefacts:
    """What the newest runs of this model left; None for what was never built. Of what takes long to read only what
    `wants` names, if it is given."""
    lists, profile = store.latest_run("build-buddies", model_id), store.latest_run("profile", model_id)
    quantised = store.latest_run("quantize", model_id)
    size = (shape.num_layers, shape.num_experts)
    buddies, q = buddy_matrices(store.read("buddies", lists.run_id), *size) if lists else (None, None)
    entropy = _entropy(store, profile, shape) if profile else None
    replicas = load_replicas(store, quantised, shape) if quantised else None
    splits, predictors = load_splits(store, model_id), load_predictors(store, model_id, shape)
    mapped = latest_maps(store, model_id)
    return Artefacts(
        buddies=buddies,
        buddy_q=q,
        entropy=entropy,
        loads=load_loads(store, model_id, shape) if wants is None or "loads" in wants else None,
        sensitivity=load_sensitivity(store, model_id, shape) if wants is None or "sensitivity" in wants else None,
        replicas=replicas,
        splits=splits,
        predictors=predictors,
        maps=stored_maps(store, run_id=mapped.run_id) if mapped else None,
        maps_run=mapped.run_id if mapped else None,
    )


def _entropy(store: Store, profile: StoredRun, shape: Shape) -> np.ndarray:
    """[L, 101]"""
    rows = store.read("entropy", profile.run_id)
    if sorted(rows["layer"].to_pylist()) != [*range(shape.num_layers)]:
        raise BadInput(f"{store.path} has no entropy of each of {shape.num_layers} layers: run moectl profile again")
    return entropy_percentiles(rows)


def load_loads(store: Store, model_id: str, shape: Shape) -> np.ndarray | None:
    """[L, E + 1] by the curves of the newest split."""
    run = store.latest_run("split", model_id)
    if run is None:
        return None
    curves = curve_matrices(store.read("curves", run.run_id), shape.num_layers, shape.num_experts)
    return loads_on_demand(*curves, shape.top_k)


def load_sensitivity(store: Store, model_id: str, shape: Shape) -> np.ndarray | None:
    """[L] by what the newest profile that measured it found a layer's output to change when an expert is left out, and
    by how much that grows in the layers after it."""
    measured = load_similarity(store, model_id, shape)
    if measured is None:
        return None
    uses = np.maximum(measured.samples, 1)
    found = (measured.left_out * uses).sum(axis=1) / uses.sum(axis=1) * passed_on(shape.num_layers).ravel()
    return found / found.mean()


def load_similarity(store: Store, model_id: str, shape: Shape) -> Similarity | None:
    """Of the newest profile that measured it."""
    runs = [run for run in store.runs() if run.info.model_id == model_id and "similarity" in run.contents]
    if not runs:
        return None
    return similarity_matrices(store.read("similarity", runs[-1].run_id), shape.num_layers, shape.num_experts)


def load_splits(store: Store, model_id: str) -> tuple[SolvedSplit, ...] | None:
    """What the runs of split of this model found, the newest first."""
    found = []
    for run in reversed(store.runs()):
        if (run.info.command, run.info.model_id) == ("split", model_id):
            found.append(_split_of(store, run))
    return tuple(found) or None


def _split_of(store: Store, run: StoredRun) -> SolvedSplit:
    budgets, _, theta, _ = split_columns(store.read("splits", run.run_id))
    asked = run.info.parameters
    with as_written(run, store.path):
        return SolvedSplit(
            int(asked["budget_bytes"]),
            str(asked.get("machine", HERE)),
            budgets,
            theta,
            Latencies(**{name: float(seconds) for name, seconds in asked["latencies"].items()}),
            solver=asked.get("found_by", asked["solver"]),
            zeta=float(asked["zeta"]),
            link=asked.get("link"),
            source=f"run {run.run_id} of {store.path.name}",
        )


def load_replicas(store: Store, run: StoredRun, shape: Shape) -> Replicas:
    """Sizes, losses and files of what one run of quantize wrote. Raises Incompatible when an expert is missing."""
    rows = store.read("replicas", run.run_id)
    key = rows["layer"].to_numpy().astype(np.int64) * shape.num_experts + rows["expert"].to_numpy()
    bits, nbytes = rows["bits"].to_numpy(), rows["nbytes"].to_numpy()
    if not set(bits.tolist()) <= set(WIDTHS):
        raise BadInput(f"{store.path} has replicas of widths that there are not: run moectl quantize again")
    files = dict(zip(key.tolist(), rows["file"].to_pylist(), strict=True))
    hashes = dict(zip(key.tolist(), rows["hash"].to_pylist(), strict=True))
    if sorted(files) != [*range(shape.num_keys)]:
        raise Incompatible(
            f"{store.path} has replicas of {len(files)} experts, the model has {shape.num_keys}: run moectl quantize"
        )
    losses = quant_loss_matrices(store.read("quant_loss", run.run_id), shape.num_layers, shape.num_experts)
    gated, mse = losses["gated"], losses["mse"]
    use = np.divide(gated, mse, out=np.zeros_like(mse), where=mse > 0)  # alike at every width
    # None is worthless because the text had no use for it.
    lost = (gated + _PRIOR_USE * mse * use.mean(axis=1, keepdims=True)) * passed_on(shape.num_layers)
    return Replicas(
        nbytes={FULL_BITS: shape.expert_nbytes}
        | {int(width): in_memory(int(nbytes[bits == width].max())) for width in set(bits)},
        loss=mse,
        lost=lost,
        use=np.nanmean(use, axis=2),
        files=tuple(inside(replica_root(store.path), files[key]) for key in range(shape.num_keys)),
        hashes=tuple(hashes[key] for key in range(shape.num_keys)),
    )

"""Loads the artefacts in a store in the form that policies take."""

from collections.abc import Collection, Sequence

import numpy as np

from artifacts.common.untrusted import inside
from artifacts.errors import BadInput, Incompatible
from artifacts.hardware.machines import HERE
from artifacts.quantisation.replica_file import replica_root
from artifacts.quantisation.replicas import Replicas, expected_use, in_memory, passed_on
from artifacts.quantisation.widths import MADE_WIDTHS, NOTHING, as_width, column_of
from artifacts.routing.similarity import Similarity
from artifacts.shape import FULL_BITS, Shape
from artifacts.splits.slots_by_layer import loads_on_demand
from artifacts.splits.solve import Latencies, SolvedSplit
from artifacts.store.expert_maps import latest_maps, stored_maps
from artifacts.store.predictors import COMMAND as PREDICTOR
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
from runtime.policies.base import Artefacts, Origin

# differences of two runs in a line, and characters of each
_MOST_NAMED = 3
_SHOWN = 40
_INCIDENTAL = (
    "profile_run",
    "folder",
    "threads",
    "seconds",
)  # of a run's parameters: no reason to tell two apart


def load_artefacts(
    store: Store,
    model_id: str,
    shape: Shape,
    *,
    wants: Collection[str] | None = None,
    base: int = FULL_BITS,
) -> Artefacts:
    """Load the artefacts that the newest runs for this model wrote; None for artefacts that were
    never built. `loads`, `sensitivity` and `coactivated` are loaded only if `wants` names them, or
    is None. Replicas in trellis codes are preferred to newer ones, if they have the width of the
    `base`.

    Raises BadInput for damaged tables, Incompatible for replicas that do not cover every expert.
    """
    buddies, q = _buddies(store, store.latest_run("build-buddies", model_id), shape) or (None, None)
    profile = store.latest_run("profile", model_id)
    quantised = _quantised(store, model_id, base)
    maps_run = latest_maps(store, model_id)
    runs = store.runs()
    used = {
        "buddies": store.latest_run("build-buddies", model_id),
        "coactivated": _by_coactivation(store, model_id),
        "entropy": profile,
        "loads": store.latest_run("split", model_id),
        "splits": store.latest_run("split", model_id),
        "sensitivity": _with_similarity(store, model_id),
        "replicas": quantised,
        "predictors": store.latest_run(PREDICTOR, model_id),
        "maps": maps_run,
    }
    return Artefacts(
        origins={name: _origin(runs, name, run) for name, run in used.items() if run},
        buddies=buddies,
        buddy_q=q,
        coactivated=_coactivated(store, model_id, shape)
        if wants is None or "coactivated" in wants
        else None,
        entropy=_entropy(store, profile, shape) if profile else None,
        loads=_loads_on_demand(store, model_id, shape)
        if wants is None or "loads" in wants
        else None,
        sensitivity=_sensitivity(store, model_id, shape)
        if wants is None or "sensitivity" in wants
        else None,
        replicas=_replicas(store, quantised, shape) if quantised else None,
        splits=_splits(store, model_id),
        predictors=load_predictors(store, model_id, shape),
        maps=stored_maps(store, run_id=maps_run.run_id) if maps_run else None,
        maps_run=maps_run.run_id if maps_run else None,
    )


def _quantised(store: Store, model_id: str, base: int) -> StoredRun | None:
    """Return the run whose replicas are taken."""
    runs = store.runs(command="quantize", model_id=model_id)
    with_base = [
        run for run in runs if base == FULL_BITS or base in run.info.parameters.get("bits", ())
    ] or runs
    coded = [run for run in with_base if run.info.parameters.get("recipe") == "trellis"]
    return next(reversed(coded or with_base), None)


def load_similarity(store: Store, model_id: str, shape: Shape) -> Similarity | None:
    """Load the similarity of experts from the newest profile that measured it; None if there is
    none."""
    run = _with_similarity(store, model_id)
    if run is None:
        return None
    return similarity_matrices(
        store.read("similarity", run.run_id), shape.num_layers, shape.num_experts
    )


def _with_similarity(store: Store, model_id: str) -> StoredRun | None:
    return store.latest_run(model_id=model_id, table="similarity")


def _origin(runs: Sequence[StoredRun], name: str, run: StoredRun) -> Origin:
    """Return the run as a receipt names it, with a note on how it differs from the previous run.
    There is no note for splits and their loads, which are told apart by machine and budget, for
    buddies by co-activation, which are asked for by their metric, or for maps, which grow. Of other
    artefacts, the newest may not be the one that the user means."""
    note = "" if name in ("coactivated", "loads", "maps", "splits") else _differs(runs, name, run)
    return Origin(run.run_id, run.info.command, run.info.data_digest, note)


def _differs(runs: Sequence[StoredRun], name: str, run: StoredRun) -> str:
    """Return one line on how the run differs from the previous run of its command and model; empty
    where it does not."""
    same = [other for other in runs if _kind(other) == _kind(run) and other.run_id < run.run_id]
    if not same:
        return ""
    other = same[-1]
    new = _made_with(run)
    old = _made_with(other)
    changed = [key for key in new if new[key] != old.get(key)]
    if not changed:
        return ""
    said = ", ".join(
        f"{key} {_short(new[key])}, there {_short(old.get(key))}" for key in changed[:_MOST_NAMED]
    )
    return (
        f"{name}: run {run.run_id} of {run.info.command} is used because it is newer than run "
        f"{other.run_id} ({said}); to use that one make it again"
    )


def _kind(run: StoredRun) -> tuple[str, str | None]:
    return run.info.command, run.info.model_id


def _made_with(run: StoredRun) -> dict[str, object]:
    """Return the data and options of a run, the most important ones first."""
    first = {
        "metric": None,
        "recipe": None,
        "data": run.info.data,
        "data_digest": run.info.data_digest[:8],
    }
    others = {key: value for key, value in run.info.parameters.items() if key not in _INCIDENTAL}
    return first | others


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _buddies(
    store: Store, run: StoredRun | None, shape: Shape
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return buddies and their share of the measure that ranked them, both [L, E, R]."""
    if run is None:
        return None
    return buddy_matrices(store.read("buddies", run.run_id), shape.num_layers, shape.num_experts)


def _coactivated(store: Store, model_id: str, shape: Shape) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the same for the newest lists that are ranked by co-activation."""
    return _buddies(store, _by_coactivation(store, model_id), shape)


def _by_coactivation(store: Store, model_id: str) -> StoredRun | None:
    built = store.runs(command="build-buddies", model_id=model_id)
    ranked = [run for run in built if run.info.parameters.get("metric") == "coactivation"]
    return ranked[-1] if ranked else None


def _entropy(store: Store, profile: StoredRun, shape: Shape) -> np.ndarray:
    """Return the percentiles of token activating entropy by layer, [L, 101]."""
    rows = store.read("entropy", profile.run_id)
    if sorted(rows["layer"].to_pylist()) != [*range(shape.num_layers)]:
        raise BadInput(
            f"{store.path} has no entropy of each of {shape.num_layers} layers: run moectl "
            "profile again"
        )
    return entropy_percentiles(rows)


def _loads_on_demand(store: Store, model_id: str, shape: Shape) -> np.ndarray | None:
    """Return the number of experts that a token loads on demand, by layer and by the number of
    experts that the layer holds, [L, E + 1], from the curves of the newest split."""
    run = store.latest_run("split", model_id)
    if run is None:
        return None
    curves = curve_matrices(store.read("curves", run.run_id), shape.num_layers, shape.num_experts)
    return loads_on_demand(*curves, shape.top_k)


def _sensitivity(store: Store, model_id: str, shape: Shape) -> np.ndarray | None:
    """Return the sensitivity of each layer to an expert that is left out, [L], 1 on average: the
    measured change of the layer's output, times its growth in the layers that follow. None where
    similarity was never measured."""
    similarity = load_similarity(store, model_id, shape)
    if similarity is None:
        return None
    uses = np.maximum(similarity.samples, 1)
    change = (
        (similarity.left_out * uses).sum(axis=1)
        / uses.sum(axis=1)
        * passed_on(shape.num_layers).ravel()
    )
    return change / change.mean()


def _splits(store: Store, model_id: str) -> tuple[SolvedSplit, ...] | None:
    """Return all solved splits, the newest first."""
    runs = store.runs(command="split", model_id=model_id)
    return tuple(_split_of(store, run) for run in reversed(runs)) or None


def _split_of(store: Store, run: StoredRun) -> SolvedSplit:
    budgets, _, theta, _ = split_columns(store.read("splits", run.run_id))
    parameters = run.info.parameters
    with as_written(run, store.path):
        return SolvedSplit(
            int(parameters["budget_bytes"]),
            str(parameters.get("machine", HERE)),
            budgets,
            theta,
            Latencies(
                **{name: float(seconds) for name, seconds in parameters["latencies"].items()}
            ),
            solver=parameters.get("found_by", parameters["solver"]),
            zeta=float(parameters["zeta"]),
            link=parameters.get("link"),
            source=f"run {run.run_id} of {store.path.name}",
        )


def _replicas(store: Store, run: StoredRun, shape: Shape) -> Replicas:
    """Return sizes, losses and files of the replicas of one run. Raises Incompatible when an expert
    is missing, BadInput for unknown widths."""
    rows = store.read("replicas", run.run_id)
    key = rows["layer"].to_numpy().astype(np.int64) * shape.num_experts + rows["expert"].to_numpy()
    bits = rows["bits"].to_numpy()
    nbytes = rows["nbytes"].to_numpy()
    if not set(bits.tolist()) <= set(MADE_WIDTHS):
        raise BadInput(
            f"{store.path} has replicas of widths that there are not: run moectl quantize again"
        )
    files = dict(zip(key.tolist(), rows["file"].to_pylist(), strict=True))
    hashes = dict(zip(key.tolist(), rows["hash"].to_pylist(), strict=True))
    if sorted(files) != [*range(shape.num_keys)]:
        raise Incompatible(
            f"{store.path} has replicas of {len(files)} experts, the model has {shape.num_keys}: "
            "run moectl quantize"
        )
    losses = quant_loss_matrices(
        store.read("quant_loss", run.run_id), shape.num_layers, shape.num_experts
    )
    gated = losses["gated"]
    mse = losses["mse"]
    use = np.divide(gated, mse, out=np.zeros_like(mse), where=mse > 0)  # equal at every width
    nothing = column_of(NOTHING)
    use[..., nothing] = np.nanmean(use, axis=2)
    gated[..., nothing] = np.nanmean(losses["energy"], axis=2)
    mse[..., nothing] = _mean_square(mse, losses["relative"])
    # Large outputs meet large routing weights, so that leaving an expert out costs more than its
    # mean square says.
    np.divide(
        gated[..., nothing], use[..., nothing], out=mse[..., nothing], where=use[..., nothing] > 0
    )
    lost = mse * expected_use(use) * passed_on(shape.num_layers)
    with as_written(run, store.path):
        no_smaller = [
            MADE_WIDTHS[MADE_WIDTHS.index(bits)]
            for bits in run.info.parameters.get("no_smaller", ())
        ]
    replicas = Replicas(
        nbytes={FULL_BITS: shape.expert_nbytes}
        | {
            as_width(width): in_memory(int(nbytes[bits == width].max()))
            for width in set(bits.tolist())
        },
        loss=mse,
        lost=lost,
        use=np.nanmean(use, axis=2),
        files=tuple(inside(replica_root(store.path), files[key]) for key in range(shape.num_keys)),
        hashes=tuple(hashes[key] for key in range(shape.num_keys)),
    )
    return replicas.without_larger(*no_smaller)


def _mean_square(mse: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Return the mean square of experts' outputs, [L, E], from squared errors [L, E, W] and the
    same errors relative to it."""
    return np.nanmean(np.divide(mse, relative, out=np.zeros_like(mse), where=relative > 0), axis=2)

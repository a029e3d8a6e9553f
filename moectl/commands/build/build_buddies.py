"""`moectl build-buddies`: build buddy lists from a profile, into the store."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Incompatible
from artifacts.routing.buddies import buddy_lists
from artifacts.routing.coactivation import conditional
from artifacts.routing.similarity import loss_scores, output_scores
from artifacts.shape import Shape
from artifacts.store.rows import (
    buddy_matrices,
    buddy_rows,
    coactivation_matrices,
    similarity_matrices,
)
from artifacts.store.runs import RunInfo, StoredRun, utc_now
from artifacts.store.store import Store
from moectl.show.render import Sheet, show_json, show_sheet
from moectl.show.store import buddy_sizes

COUNTED = ("weighted", "coactivation")
METRICS = ("loss", "output", *COUNTED)
DEFAULT_ALPHA = 0.95
_MOST_EPSILON = 1_000_000
PROFILE = "profile"
COMMAND = "build-buddies"


@dataclass(frozen=True, slots=True)
class BuiltBuddies:
    """The stored lists and the profile they are built from; `sizes` has a row for each layer."""

    run_id: int
    profile_run: int
    metric: str
    k_max: int
    sizes: Sheet


def build_buddies(
    store: Path, *, run: int | None, alpha: str, k_max: int, metric: str, epsilon: float = 0.0
) -> BuiltBuddies:
    """Cut the buddy lists of every layer from a profile (the newest unless `run` names one) and
    store them.

    `alpha` is one number, one per layer separated by commas, or `layer:number` pairs; `epsilon` is
    added to every count of co-activation. Raises BadUsage (alpha, metric, epsilon), BadInput (no
    store, no such run) and Incompatible (no profile in the store).
    """
    check_metric(metric)
    _check_epsilon(epsilon, metric)
    started_at = utc_now()
    start_s = time.monotonic()
    with Store.open(store, read_only=True) as opened:
        profile = find_profile(opened, run)
        shape = next(
            model.shape for model in opened.models() if model.model_id == profile.info.model_id
        )
        q = metric_scores(opened, profile, shape, metric, epsilon=epsilon)
    alphas = parse_alphas(alpha, shape.num_layers)
    rows = cut(q, alphas, k_max)
    info = RunInfo(
        command=COMMAND,
        model_id=profile.info.model_id,
        started_at=started_at,
        seconds=time.monotonic() - start_s,
        data=profile.info.data,
        data_digest=profile.info.data_digest,
        tokens=profile.info.tokens,
        seed=profile.info.seed,
        parameters={
            "profile_run": profile.run_id,
            "metric": metric,
            "alpha": alphas,
            "k_max": k_max,
            "epsilon": epsilon,
        },
    )
    with Store.open(store) as opened:
        run_id = opened.write_run(info, {"buddies": rows})
    sizes = buddy_sizes(*buddy_matrices(rows, shape.num_layers, shape.num_experts), alphas)
    return BuiltBuddies(run_id, profile.run_id, metric, k_max, sizes)


def check_metric(metric: str) -> None:
    """Raise BadUsage, naming the known ones, for an unknown metric."""
    if metric not in METRICS:
        raise BadUsage(unknown("metric", metric, METRICS))


def _check_epsilon(epsilon: float, metric: str) -> None:
    if not 0 <= epsilon <= _MOST_EPSILON:
        raise BadUsage(f"epsilon is a number from 0 to {_MOST_EPSILON:,}, not {epsilon:g}")
    if epsilon and metric not in COUNTED:
        raise BadUsage(
            f"--epsilon smooths counts, which {metric} does not have: add --metric coactivation "
            "or weighted"
        )


def metric_scores(
    store: Store, profile: StoredRun, shape: Shape, metric: str, *, epsilon: float = 0.0
) -> np.ndarray:
    """Return q [L, E, E]: by a metric, the share of each peer in standing in for an expert. Each
    row sums to 1; counts are smoothed by `epsilon`.

    Raises Incompatible when the profile did not measure what the metric needs.
    """
    size = (shape.num_layers, shape.num_experts)
    if metric in COUNTED:
        pairs, weighted = coactivation_matrices(store.read("coactivations", profile.run_id), *size)
        return np.stack(
            [
                conditional(layer, epsilon)
                for layer in (pairs if metric == "coactivation" else weighted)
            ]
        )
    if "similarity" not in profile.contents:
        raise Incompatible(
            f"run {profile.run_id} of {store.path} was profiled without similarity, which the "
            f"metric {metric} needs: profile again, or take --metric coactivation"
        )
    similarity = similarity_matrices(store.read("similarity", profile.run_id), *size)
    if metric == "output":
        return np.stack([output_scores(layer) for layer in similarity.cosine])
    return np.stack([loss_scores(layer) for layer in similarity.loss])


def cut(q: np.ndarray, alphas: Sequence[float], k_max: int) -> pa.Table:
    """Cut the lists of every layer from q [L, E, E]; return the rows of the table `buddies`."""
    return buddy_rows(
        [buddy_lists(layer, alpha, k_max) for layer, alpha in zip(q, alphas, strict=True)], q
    )


def show(built: BuiltBuddies, *, as_json: bool) -> None:
    """Print the sizes of the lists by layer, or one JSON object."""
    if as_json:
        summary = {
            "run": built.run_id,
            "profile_run": built.profile_run,
            "metric": built.metric,
            "k_max": built.k_max,
        }
        show_json(summary | {"layers": built.sizes.records()})
    else:
        show_sheet(built.sizes)


def find_profile(store: Store, run_id: int | None, *, model_id: str | None = None) -> StoredRun:
    """Return the profile run of that number, else the newest one (of the model if one is given).

    Raises BadUsage for a run that is no profile, Incompatible when there is none.
    """
    run = store.latest_run(PROFILE, model_id) if run_id is None else store.run(run_id)
    if run is None:
        raise Incompatible(
            f"{store.path} holds no profile to build from; run moectl profile MODEL first"
        )
    if run.info.command != PROFILE:
        raise BadUsage(
            f"run {run_id} is a {run.info.command}, not a profile; moectl inspect runs lists them"
        )
    return run


def parse_alphas(text: str, num_layers: int) -> list[float]:
    """Return one alpha per layer from `0.95`, `0.9,0.95,...` (one per layer) or `0:0.9,3:0.8`
    (others: 0.95)."""
    parts = [part.strip() for part in text.split(",")]
    if any(":" in part for part in parts):
        alphas = [DEFAULT_ALPHA] * num_layers
        for part in parts:
            layer, _, number = part.partition(":")
            if not layer.isdecimal() or int(layer) >= num_layers:
                raise BadUsage(
                    f"alpha {part!r}: write LAYER:NUMBER with a layer from 0 to {num_layers - 1}"
                )
            alphas[int(layer)] = _alpha(number)
        return alphas
    if len(parts) not in (1, num_layers):
        raise BadUsage(
            f"alpha needs one number or one for each of the {num_layers} layers, not {len(parts)}"
        )
    return [_alpha(part) for part in parts] * (num_layers if len(parts) == 1 else 1)


def _alpha(text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        raise BadUsage(f"alpha {text!r} is not a number") from None
    if not 0 < alpha <= 1:
        raise BadUsage(f"alpha must be above 0 and at most 1, not {text}")
    return alpha

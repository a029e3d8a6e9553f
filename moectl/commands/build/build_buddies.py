"""`moectl build-buddies`: build buddy lists from a profile, into the store."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Incompatible
from moectl.cli.options import Json, RunId, StorePath
from moectl.shared.defaults import DEFAULT_STORE

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from artifacts.shape import Shape
    from artifacts.store.runs import StoredRun
    from artifacts.store.store import Store
    from moectl.show.render import Sheet

COUNTED = ("weighted", "coactivation")
METRICS = ("loss", "output", *COUNTED)
DEFAULT_ALPHA = 0.95
_MOST_EPSILON = 1_000_000
PROFILE = "profile"
COMMAND = "build-buddies"


def build_buddies(
    *,
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    alpha: Annotated[
        str,
        typer.Option(
            help=(
                "Share of the metric that a list covers: one number, one per layer, or "
                "LAYER:NUMBER,..."
            )
        ),
    ] = "0.95",
    k_max: Annotated[int, typer.Option(min=1, help="Longest list.")] = 16,
    metric: Annotated[
        str,
        typer.Option(
            help="What ranks buddies: loss or output (both measured), coactivation or weighted."
        ),
    ] = "loss",
    epsilon: Annotated[
        float,
        typer.Option(help="Laplace smoothing: added to every count of coactivation or weighted."),
    ] = 0.0,
    json: Json = False,
) -> None:
    """List, for each expert, which others may stand in for it.

    The lists are built from a profile.
    """
    from moectl.show.render import show_json, show_sheet

    run_id, profile_run, sizes = make_buddies(
        store, run=run, alpha=alpha, k_max=k_max, metric=metric, epsilon=epsilon
    )
    if json:
        summary = {"run": run_id, "profile_run": profile_run, "metric": metric, "k_max": k_max}
        show_json(summary | {"layers": sizes.records()})
        return
    show_sheet(sizes)


def make_buddies(
    store: Path, *, run: int | None, alpha: str, k_max: int, metric: str, epsilon: float = 0.0
) -> tuple[int, int, "Sheet"]:
    """Cut the buddy lists of every layer from a profile (the newest unless `run` names one) and
    store them. Return the run that holds them, the run of the profile, and the sizes by layer.

    `alpha` is one number, one per layer separated by commas, or `layer:number` pairs; `epsilon` is
    added to every count of co-activation. Raises BadUsage (alpha, metric, epsilon), BadInput (no
    store, no such run) and Incompatible (no profile in the store).
    """
    from artifacts.store.rows import buddy_matrices
    from artifacts.store.runs import RunInfo, utc_now
    from artifacts.store.store import Store
    from moectl.show.store import buddy_sizes

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
    return run_id, profile.run_id, sizes


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
    store: "Store", profile: "StoredRun", shape: "Shape", metric: str, *, epsilon: float = 0.0
) -> "np.ndarray":
    """Return q [L, E, E]: by a metric, the share of each peer in standing in for an expert. Each
    row sums to 1; counts are smoothed by `epsilon`.

    Raises Incompatible when the profile did not measure what the metric needs.
    """
    import numpy as np

    from artifacts.routing.coactivation import conditional
    from artifacts.routing.similarity import loss_scores, output_scores
    from artifacts.store.rows import coactivation_matrices, similarity_matrices

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


def cut(q: "np.ndarray", alphas: Sequence[float], k_max: int) -> "pa.Table":
    """Cut the lists of every layer from q [L, E, E]; return the rows of the table `buddies`."""
    from artifacts.routing.buddies import buddy_lists
    from artifacts.store.rows import buddy_rows

    return buddy_rows(
        [buddy_lists(layer, alpha, k_max) for layer, alpha in zip(q, alphas, strict=True)], q
    )


def find_profile(
    store: "Store", run_id: int | None, *, model_id: str | None = None
) -> "StoredRun":
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

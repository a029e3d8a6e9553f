"""A routing log that was read from another program's file, checked and made into a trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.traces.checks import check_rows
from artifacts.traces.trace import Trace

_MOST_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Facts that a log may leave open: `tokens` keeps only this many of the first tokens, `batch`
    is the number of requests that are decoded together, `top_k` the number of experts that a token
    selects."""

    tokens: int | None = None
    batch: int | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RoutingLog:
    """N rows in any order, one per (pass, layer, token), K experts selected of E. `place(row)` says
    where the source has the row, `notes` what was assumed in reading it."""

    request: np.ndarray  # [N]
    pass_: np.ndarray  # [N]
    phase: np.ndarray  # [N] PREFILL or DECODE
    layer: np.ndarray  # [N], as the source numbers them
    token: np.ndarray  # [N], position in its request
    experts: np.ndarray  # [N, K]
    weights: np.ndarray | None  # [N, K]
    place: Callable[[int], str]
    probabilities: np.ndarray | None = None  # [N, E]
    notes: tuple[str, ...] = ()

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[int],
        experts: np.ndarray,
        place: Callable[[int, int], str],
        *,
        request: np.ndarray,
        pass_: np.ndarray,
        phase: np.ndarray,
        token: np.ndarray,
        weights: np.ndarray | None = None,
        probabilities: np.ndarray | None = None,
        notes: tuple[str, ...] = (),
    ) -> "RoutingLog":
        """Return the log of arrays [L, T, K], and [L, T, E], of these layers, whose columns [T] are
        the same in each layer; `place(layer, token)` counts both from 0."""
        num_layers, num_tokens, _ = experts.shape
        return cls(
            request=np.tile(request, num_layers),
            pass_=np.tile(pass_, num_layers),
            phase=np.tile(phase, num_layers),
            layer=np.repeat(layers, num_tokens),
            token=np.tile(token, num_layers),
            experts=_flat(experts),
            weights=_flat(weights),
            place=lambda row: place(row // num_tokens, row % num_tokens),
            probabilities=_flat(probabilities),
            notes=notes,
        )


def _flat(by_layer: np.ndarray | None) -> np.ndarray | None:
    return None if by_layer is None else by_layer.reshape(-1, by_layer.shape[-1])


def trace_of(log: RoutingLog, *, tokens: int | None = None) -> Trace:
    """Return the log as a trace, of its first `tokens` tokens in whole passes; `assumed` has the
    notes of the log.

    Layers are numbered from 0 in their order, passes in theirs, and experts stand strongest first.
    Raises BadInput, which names the place in the source.
    """
    if not len(log.layer):
        raise BadInput("there is no row of a token in it")
    _check(log)
    notes = list(log.notes)
    layers, layer = np.unique(log.layer, return_inverse=True)
    if layers[-1] != len(layers) - 1:
        notes.append(
            f"layers {', '.join(map(str, layers))} of the log are layers 0 to {len(layers) - 1} "
            "of the trace"
        )
    experts, weights = _strongest_first(log)
    if log.weights is None:
        notes.append(
            "the log has no weights: selected experts weigh the same, and stand in the order of "
            "the log"
        )
    trace = Trace(
        request=np.unique(log.request, return_inverse=True)[1].astype(np.int32),
        pass_=np.unique(log.pass_, return_inverse=True)[1].astype(np.int32),
        phase=log.phase.astype(np.uint8),
        layer=layer.astype(np.int32),
        token=log.token.astype(np.int32),
        experts=experts.astype(np.uint16),
        weights=weights.astype(np.float32),
        probabilities=log.probabilities,
    )
    trace = trace.take(np.lexsort((trace.layer, trace.pass_)))
    trace = trace if tokens is None else _first(trace, tokens)
    return replace(trace, assumed=(*notes, *check_rows(trace)))


def _check(log: RoutingLog) -> None:
    """Raise BadInput for the first row with an expert that cannot be, or twice, or weights that are
    none."""
    ordered = np.sort(log.experts, axis=1)
    wrong = {
        f"an expert below 0 or above {_MOST_EXPERTS - 1}": (ordered[:, 0] < 0)
        | (ordered[:, -1] >= _MOST_EXPERTS),
        "an expert twice": (ordered[:, 1:] == ordered[:, :-1]).any(axis=1),
    }
    if log.weights is not None:
        weights = np.asarray(log.weights, np.float64)
        wrong["a weight that is negative or not finite"] = ~(
            np.isfinite(weights) & (weights >= 0)
        ).all(axis=1)
        wrong["no weight above 0"] = ~(weights > 0).any(axis=1)
    for what, rows in wrong.items():
        if rows.any():
            row = int(rows.argmax())
            selected = ", ".join(map(str, log.experts[row]))
            raise BadInput(
                f"{log.place(row)} has {what} (experts {selected}); expected: the different "
                "experts of a token, counted from 0, with their weights if there are any"
            )


def _strongest_first(log: RoutingLog) -> tuple[np.ndarray, np.ndarray]:
    if log.weights is None:
        return log.experts, np.full(log.experts.shape, 1 / log.experts.shape[1])
    order = np.argsort(-np.asarray(log.weights, np.float64), axis=1, kind="stable")
    return np.take_along_axis(log.experts, order, axis=1), np.take_along_axis(
        log.weights, order, axis=1
    )


def _first(trace: Trace, tokens: int) -> Trace:
    """Return the first passes: as many as have no more than `tokens` tokens together, but at least
    one."""
    in_first_layer = np.bincount(
        trace.pass_[trace.layer == 0], minlength=int(trace.pass_.max()) + 1
    )
    num_passes = max(1, int(np.searchsorted(in_first_layer.cumsum(), tokens, side="right")))
    return trace.take(np.flatnonzero(trace.pass_ < num_passes))

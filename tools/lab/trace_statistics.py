"""Statistics of a trace's routing, as the dials of a synthetic trace move them."""

from dataclasses import dataclass

import numpy as np

from artifacts.traces.trace import DECODE, PREFILL, Trace


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics that the dials move, each between 0 and 1; None where the trace does not contain
    it.

    `concentration` (skew): 1 less the entropy of use over its maximum, mean over layers. `reuse`
    (locality): share of a token's experts that the request's next token selects too. `similarity`:
    cosine of a request's uses in prefill and in decoding, mean over requests and layers.
    `prediction` (predictability): share of a layer's experts that are among the K most probable
    ones predicted one layer before; `near_prediction` (grading): among the 2K most probable.
    """

    concentration: float
    reuse: float | None
    similarity: float | None
    prediction: float | None
    near_prediction: float | None


def measure(trace: Trace, num_experts: int) -> Statistics:
    """Measure the statistics of any trace."""
    return Statistics(
        concentration=_concentration(trace, num_experts),
        reuse=_reuse(trace),
        similarity=_similarity(trace, num_experts),
        prediction=recall(trace, trace.top_k),
        near_prediction=recall(trace, min(2 * trace.top_k, num_experts)),
    )


def _concentration(trace: Trace, num_experts: int) -> float:
    if num_experts == 1:
        return 0.0
    use = _counts(trace.layer, trace.experts, num_experts)
    share = use / np.maximum(use.sum(axis=1, keepdims=True), 1)
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return float(1 - entropy[use.any(axis=1)].mean() / np.log(num_experts))


def _reuse(trace: Trace) -> float | None:
    order = np.lexsort((trace.token, trace.layer, trace.request))
    follows = (np.diff(trace.request[order]) == 0) & (np.diff(trace.layer[order]) == 0)
    first = np.flatnonzero(follows)
    return _overlap(trace.experts[order[first]], trace.experts[order[first + 1]])


def _similarity(trace: Trace, num_experts: int) -> float | None:
    _, request = np.unique(trace.request, return_inverse=True)
    group = request * trace.num_layers + trace.layer
    size = int(group.max()) + 1
    uses = [
        _counts(group[at], trace.experts[at], num_experts, size=size)
        for at in (trace.phase == PREFILL, trace.phase == DECODE)
    ]
    norms = np.linalg.norm(uses[0], axis=1) * np.linalg.norm(uses[1], axis=1)
    products = (uses[0] * uses[1]).sum(axis=1)
    return float((products[norms > 0] / norms[norms > 0]).mean()) if (norms > 0).any() else None


def recall(trace: Trace, width: int) -> float | None:
    """Return the share of a layer's experts that are among the `width` most probable ones predicted
    one layer before; None if the trace has no predictions."""
    if trace.predicted is None:
        return None
    order = np.lexsort((trace.layer, trace.token, trace.request))
    same = [np.diff(column[order]) == 0 for column in (trace.request, trace.token)]
    first = np.flatnonzero(same[0] & same[1] & (np.diff(trace.layer[order]) == 1))
    best = np.argsort(-trace.predicted[order[first], 0], axis=1, kind="stable")[:, :width]
    return _overlap(best, trace.experts[order[first + 1]])


def _overlap(first: np.ndarray, second: np.ndarray) -> float | None:
    """Mean share of the ids of `second` [n, K] that are in `first` too."""
    return (
        float((second[:, :, None] == first[:, None, :]).any(axis=2).mean()) if len(first) else None
    )


def _counts(
    group: np.ndarray, experts: np.ndarray, num_experts: int, *, size: int | None = None
) -> np.ndarray:
    """[groups, E] uses."""
    size = int(group.max()) + 1 if size is None else size
    cell = np.repeat(group.astype(np.int64) * num_experts, experts.shape[1]) + experts.ravel()
    return np.bincount(cell, minlength=size * num_experts).reshape(size, num_experts)

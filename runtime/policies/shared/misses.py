"""Helpers of miss policies: stand-ins by a score over a layer's experts, absent ranks, routing
weights, and a check of replicas."""

from collections.abc import Callable

import numpy as np

from artifacts.errors import Incompatible
from artifacts.shape import FULL_BITS
from runtime.policies.base import Artefacts, Residents, Step
from runtime.policies.step import fitting

Scores = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # tokens [t], missing experts [t] -> [t, E], -inf: never


def stand_in(
    selected: np.ndarray, replaceable: np.ndarray, resident: np.ndarray, scores: Scores
) -> np.ndarray:
    """Return `selected` [T, K] with the ranks marked in `replaceable` [T, K] served by the resident
    expert of largest score.

    An expert serves a token once: neither the selected ones nor earlier stand-ins are taken again.
    Ranks are visited from 0 upward; ties go to the lower expert; a rank without a candidate stays.
    """
    selected = selected.copy()
    for rank in range(selected.shape[1]):
        tokens = np.flatnonzero(replaceable[:, rank])
        if not tokens.size:
            continue
        score = np.where(resident, scores(tokens, selected[tokens, rank]), -np.inf)
        np.put_along_axis(score, selected[tokens], -np.inf, axis=1)
        best = score.argmax(axis=1)
        is_served = np.isfinite(score[np.arange(len(tokens)), best])
        selected[tokens[is_served], rank] = best[is_served]
    return selected


def drawn(rng: np.random.Generator, num_experts: int) -> Scores:
    """Score experts at random."""
    return lambda tokens, missing: rng.random((len(tokens), num_experts))


def by_probability(step: Step) -> Scores:
    """Score experts by the router's own probability."""
    assert step.probabilities is not None, "best_resident runs without router probabilities"
    return lambda tokens, missing: step.probabilities[tokens]


def beyond_free(step: Step, residents: Residents, *, fill: bool) -> np.ndarray:
    """Return [T, K] the ranks whose expert is absent; with `fill` without those for which the scope
    has empty slots, first come, first served."""
    missing = residents.absent[step.selected]
    if not fill or not any(residents.num_free):
        return missing
    filled = fitting(residents.missing(step), residents.num_free)
    return missing & ~np.isin(step.selected, filled)


def count_uses(uses: np.ndarray, step: Step, weight: float | np.ndarray, half_life: float) -> None:
    """Let the `uses` [E] of a layer decay by the step's tokens, then count those of the step, each
    as its `weight` [T, K]."""
    uses *= 0.5 ** (len(step.selected) / half_life)
    np.add.at(uses, step.selected, weight)


def paying(
    absent: np.ndarray, worth: np.ndarray, residents: Residents, margin: float
) -> tuple[int, ...]:
    """Return those of `absent` that are worth a load which no step waits for, best first: more than
    `margin` times the least `worth` [E] of a resident, or as many as there are empty slots."""
    best = absent[np.argsort(-worth[absent], kind="stable")]
    pays = worth[best] > margin * worth[residents.resident].min(initial=np.inf)
    if any(residents.num_free):
        pays |= np.isin(best, fitting(best.tolist(), residents.num_free))
    return tuple(best[pays].tolist())


def check_replicas(name: str, artefacts: Artefacts, *needed: int) -> None:
    """Raise Incompatible when the store lacks a precision that a policy picks."""
    replicas = artefacts.replicas
    for bits in needed:
        if bits not in replicas.nbytes and bits in replicas.at_full and replicas.base == FULL_BITS:
            raise Incompatible(
                f"{name} needs replicas of {bits} bits, which are no smaller than the experts of "
                "the checkpoint: pick of "
                f"{', '.join(map(str, replicas.widths)) or 'presets without replicas'}"
            )
        if bits not in replicas.nbytes:
            built = ", ".join(map(str, sorted(replicas.nbytes)))
            if replicas.base != FULL_BITS:
                built = (
                    f"{', '.join(map(str, replicas.widths)) or 'none'} below a base of "
                    f"{replicas.base}"
                )
            raise Incompatible(
                f"{name} needs replicas of {bits} bits; there are {built}: build them or pick of "
                "these"
            )


def keep_sum(weights: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Return weights [T, K] with dropped ranks (selected -1) at zero and the others scaled, so that
    each token keeps its sum."""
    kept = np.where(selected < 0, 0, weights)
    total = kept.sum(axis=1, keepdims=True)
    return kept * np.divide(
        weights.sum(axis=1, keepdims=True), total, out=np.zeros_like(total), where=total > 0
    )

"""Who stands in for a missing expert, by a score over all experts of the layer."""

from collections.abc import Callable

import numpy as np

from runtime.policies.base import Step

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]  # tokens [t], missing experts [t] -> [t, E], -inf: may not


def stand_in(selected: np.ndarray, replaceable: np.ndarray, resident: np.ndarray, scores: Scores) -> np.ndarray:
    """[T, K] `selected` with the ranks marked in `replaceable` [T, K] served by the resident expert of largest score.

    An expert serves a token once: neither the selected ones nor earlier stand-ins are taken again. Ranks are visited
    from 0 upward; equals go to the lower expert; a rank for which there is nobody stays as it is.
    """
    selected = selected.copy()
    for rank in range(selected.shape[1]):
        tokens = np.flatnonzero(replaceable[:, rank])
        if not tokens.size:
            continue
        score = np.where(resident, scores(tokens, selected[tokens, rank]), -np.inf)
        np.put_along_axis(score, selected[tokens], -np.inf, axis=1)
        best = score.argmax(axis=1)
        found = np.isfinite(score[np.arange(len(tokens)), best])
        selected[tokens[found], rank] = best[found]
    return selected


def drawn(rng: np.random.Generator, num_experts: int) -> Scores:
    """Any expert as likely as any other."""
    return lambda tokens, missing: rng.random((len(tokens), num_experts))


def by_probability(step: Step) -> Scores:
    """The higher the router's own probability, the better."""
    assert step.probabilities is not None, "best_resident runs without router probabilities"
    return lambda tokens, missing: step.probabilities[tokens]

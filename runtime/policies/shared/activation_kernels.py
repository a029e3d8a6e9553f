"""The compiled loops of the policies named activation; they round as plain Python does.

Shapes: T tokens, K selected, L layers, E experts, D layers ahead.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel


@exact_part
def _count(selected, counts):
    for token in range(len(selected)):
        for rank in range(selected.shape[1]):
            expert = selected[token, rank]
            if expert >= 0:
                counts[expert] += 1


@exact_part
def _total(counts):
    """Return the sum of counts, at least 1."""
    total = 0
    for expert in range(len(counts)):
        total += counts[expert]
    return max(total, 1)


@kernel("void(int64[:, ::1], int64[::1])", exact=True)
def count(selected, counts):
    """Add the tokens of `selected` [T, K] to `counts` [E] by expert; dropped ranks (-1) are left
    out."""
    _count(selected, counts)


@kernel("void(int64[:, ::1], int64[::1], float64, float64, float64[::1])", exact=True)
def weigh(selected, counts, epsilon, early, worth):
    """Count, and set `worth` [E], the eviction priority of experts: `(share + epsilon) * early`."""
    _count(selected, counts)
    total = _total(counts)
    for expert in range(len(counts)):
        worth[expert] = (counts[expert] / total + epsilon) * early


@kernel(
    (
        "int64(int64, int64[:, ::1], float64[:, ::1], boolean, int64, float64, float64[::1], "
        "int64[::1], float64[::1])"
    ),
    exact=True,
)
def most_urgent(layer, counts, matched, is_matched, width, epsilon, discounts, keys, urgency):
    """Find the `width` experts with the largest share above 0 in each of the next D layers, by
    `matched` [L, E] if it `is_matched`, else by `counts` [L, E].

    Writes all of them to `keys` and `urgency` [D * width] in falling order of `(share + epsilon) *
    discount`, `discounts` [D], ties by the sooner layer. Returns how many there are.
    """
    num_layers, num_experts = counts.shape
    best = np.empty(width, np.int64)
    share = np.empty(num_experts)
    num_found = 0
    for ahead in range(len(discounts)):
        target = (layer + 1 + ahead) % num_layers
        num_held = 0
        total = _total(counts[target])
        for expert in range(num_experts):
            share[expert] = (
                matched[target, expert] if is_matched else counts[target, expert] / total
            )
            if share[expert] <= 0 or (
                num_held == width and share[expert] <= share[best[width - 1]]
            ):
                continue
            at = min(num_held, width - 1)
            while at > 0 and share[best[at - 1]] < share[expert]:
                best[at] = best[at - 1]
                at -= 1
            best[at] = expert
            num_held = min(num_held + 1, width)
        for place in range(num_held):
            value = (share[best[place]] + epsilon) * discounts[ahead]
            at = num_found
            while at > 0 and urgency[at - 1] < value:
                keys[at] = keys[at - 1]
                urgency[at] = urgency[at - 1]
                at -= 1
            keys[at] = target * num_experts + best[place]
            urgency[at] = value
            num_found += 1
    return num_found

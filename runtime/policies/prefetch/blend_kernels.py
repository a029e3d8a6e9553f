"""The compiled loops of blend; `tests/runtime/policies/blend_reference.py` computes the same in
plain numpy.

Shapes: T tokens, K selected, L layers, D distances, E experts, F features of an expert: 1; the
margin of each source and its positive part; the log odds of each running frequency; with maps,
theirs.
"""

import math

import numpy as np

from artifacts.common.numba_loops import kernel, part

MOST = 4.0  # log odds beyond which margins are cut
LEAST = 1e-3  # smallest frequency
KEPT = 0.9995  # factor of the moments at each visit
_LEAST_SAID = np.float32(1e-9)


@part
def _log_odds(often):
    held = min(max(often, LEAST), 1 - LEAST)
    return math.log(held / (1 - held))


@part
def _solved(moments, products):
    """Solve `moments` [F, F] (symmetric, positive definite) times the answer [F] = `products` [F],
    by Cholesky."""
    size = len(products)
    lower = np.zeros((size, size))
    answer = np.zeros(size)
    for row in range(size):
        for column in range(row + 1):
            total = moments[row, column]
            for other in range(column):
                total -= lower[row, other] * lower[column, other]
            lower[row, column] = (
                math.sqrt(total) if row == column else total / lower[column, column]
            )
    for row in range(size):
        total = products[row]
        for other in range(row):
            total -= lower[row, other] * answer[other]
        answer[row] = total / lower[row, row]
    for row in range(size - 1, -1, -1):
        for other in range(row + 1, size):
            answer[row] -= lower[other, row] * answer[other]
        answer[row] /= lower[row, row]
    return answer


@part
def _learn(used, known, predicted, weights, moments):
    """Do a Newton step of one regression: it gave the chances `predicted` [E] for the features
    `known` [F, E], and `used` [E] is what was used."""
    num_kinds, num_experts = known.shape
    weighed = np.empty(num_experts)
    missed = np.empty(num_kinds)
    for kind in range(num_kinds):
        total = 0.0
        for expert in range(num_experts):
            weighed[expert] = known[kind, expert] * (predicted[expert] * (1 - predicted[expert]))
            total += known[kind, expert] * (used[expert] - predicted[expert])
        missed[kind] = total
        for other in range(kind + 1):
            moment = 0.0
            for expert in range(num_experts):
                moment += weighed[expert] * known[other, expert]
            moments[kind, other] += moment
            moments[other, kind] = moments[kind, other]
    newton = _solved(moments, missed)
    for kind in range(num_kinds):
        weights[kind] += newton[kind]
        for other in range(num_kinds):
            moments[kind, other] *= KEPT


@part
def _state(block, num_layers, reach, num_kinds, num_experts):
    """Return the views of `visit`."""
    gains = block[:3]
    start = 3
    often = 3 * num_layers * num_experts
    uses = block[start : start + often].reshape((num_layers, 3, num_experts))
    start = start + often
    odds = block[start : start + often].reshape((num_layers, 3, num_experts))
    start = start + often
    size = num_layers * reach * num_experts
    visits = num_layers * reach
    predicted = block[start : start + size].reshape((num_layers, reach, num_experts))
    start = start + size
    size = visits * num_kinds
    weights = block[start : start + size].reshape((num_layers, reach, num_kinds))
    start = start + size
    size *= num_kinds
    moments = block[start : start + size].reshape((num_layers, reach, num_kinds, num_kinds))
    start = start + size
    known = block[start:].reshape((num_layers, reach, num_kinds, num_experts))
    return gains, uses, odds, predicted, weights, moments, known


@part
def _visit(selected, layer, learns, gains, uses, odds, predicted, weights, moments, known):
    num_experts = uses.shape[2]
    counts = np.zeros(num_experts)
    is_used = np.zeros(num_experts)
    for token in range(len(selected)):
        for rank in range(selected.shape[1]):
            expert = selected[token, rank]
            if expert >= 0:
                counts[expert] += 1
                is_used[expert] = 1
    if learns:
        for ahead in range(predicted.shape[1]):
            said = predicted[layer, ahead]
            if said[0] == said[0]:
                _learn(
                    is_used, known[layer, ahead], said, weights[layer, ahead], moments[layer, ahead]
                )
                for expert in range(num_experts):
                    said[expert] = np.nan
    for kind in range(len(gains)):
        for expert in range(num_experts):
            often = uses[layer, kind, expert]
            often += gains[kind] * (counts[expert] / len(selected) - often)
            uses[layer, kind, expert] = often
            odds[layer, kind, expert] = _log_odds(often)


@kernel("void(int64[:, ::1], int64, boolean, float64[::1], int64, int64, int64, int64)")
def visit(selected, layer, learns, state, num_layers, reach, num_kinds, num_experts):
    """Note that a layer uses `selected` [T, K]: update its running frequencies and their log odds.

    `state` is one block with these parts: `gains` [3] of the running frequencies; the frequencies
    `uses` [L, 3, E]; their log odds `odds`; the chances `predicted` [L, D, E] of the next visit of
    each layer, nan if there are none; `weights` [L, D, F]; `moments` [L, D, F, F]; and the features
    `known` [L, D, F, E] that the chances were computed from. If it `learns`, the chances of this
    visit are compared with it, which updates weights and moments.
    """
    _visit(selected, layer, learns, *_state(state, num_layers, reach, num_kinds, num_experts))


@part
def _limit(row, top_k, best):
    """Return the middle between the k-th largest of `row` and the next; `best` [k + 1] is
    overwritten."""
    size = min(top_k + 1, len(row))
    num_held = 0
    for place in range(len(row)):
        value = row[place]
        if num_held == size and value <= best[size - 1]:
            continue
        at = min(num_held, size - 1)
        while at and best[at - 1] < value:
            best[at] = best[at - 1]
            at -= 1
        best[at] = value
        num_held = min(num_held + 1, size)
    return (best[size - 1] + best[top_k - 1]) / np.float32(2)


@part
def _raise_to_margin(said, top_k, odds, best, margin):
    """Raise `margin` [E] to the margin by which each expert is in, or out of, the k largest of one
    token's `said` [E]; `odds` [E] and `best` [k + 1] are overwritten."""
    for expert in range(len(said)):
        odds[expert] = math.log(max(said[expert], _LEAST_SAID))
    limit = _limit(odds, top_k, best)
    for expert in range(len(said)):
        own = min(max(odds[expert] - limit, np.float32(-MOST)), np.float32(MOST))
        margin[expert] = max(margin[expert], own)


@part
def _hear(said, ahead, is_in_pass, last, top_k, odds, best, known):
    """Write to `known` [2, E] the largest margin that any token of `said` [T, D, E] gives each
    expert, and its positive part. For a layer of the next pass only the tokens `last` count."""
    for expert in range(len(odds)):
        known[0, expert] = -MOST
    if is_in_pass:
        for token in range(len(said)):
            _raise_to_margin(said[token, ahead], top_k, odds, best, known[0])
    else:
        for request in range(len(last)):
            _raise_to_margin(said[last[request], ahead], top_k, odds, best, known[0])
    for expert in range(len(odds)):
        known[1, expert] = max(known[0, expert], 0)


@part
def _predict(weights, known, chances):
    """Set `chances` [E] of use by the logistic regression `weights` [F] of the features `known` [F,
    E]."""
    num_kinds, num_experts = known.shape
    for expert in range(num_experts):
        chances[expert] = 0
    for kind in range(num_kinds):
        for expert in range(num_experts):
            chances[expert] += weights[kind] * known[kind, expert]
    for expert in range(num_experts):
        chances[expert] = 1 / (1 + math.exp(-min(max(chances[expert], -12.0), 12.0)))


@part
def _sorted_in(expert, at, num_proposed, chances, proposed):
    """Insert an expert in `proposed` from `at` on, by falling chances, ties by the lower expert."""
    place = num_proposed
    while place > at and chances[proposed[place - 1]] < chances[expert]:
        proposed[place] = proposed[place - 1]
        place -= 1
    proposed[place] = expert


@part
def _propose(chances, least, first_key, start, proposed):
    """Append the keys of experts whose chance is at least `least` to the first `start` of
    `proposed`, the likeliest first; returns how many there are then."""
    num_proposed = start
    for expert in range(len(chances)):
        if chances[expert] >= least:
            _sorted_in(expert, start, num_proposed, chances, proposed)
            num_proposed += 1
    for place in range(start, num_proposed):
        proposed[place] += first_key
    return num_proposed


@kernel(
    "int64[::1](int64[:, ::1], int64, boolean, float64[::1], int64, int64, int64, int64, int64, "
    "float32[:, :, ::1],float32[:, :, ::1], int64[::1], float64[:, ::1], float64, float64)"
)
def likely(
    selected, layer, learns, state, num_layers, reach, num_kinds, num_experts, top_k,
    routers, fitted, last, mapped, floor, far
):  # fmt: skip
    """Do a `visit`, then return keys of the next D layers whose chance of use is at least `floor`
    in the next layer and `far` beyond it, sooner layers first, likelier experts first. Features and
    chances are kept in `state` for the visit of their layer.

    `routers` and `fitted` [T, D or more, E]: the predictions of each source, [0, 0, E] for a source
    that is not read; past the last layer only the tokens `last` count. `mapped` [D, E]: log odds by
    the matched maps, [0, E] without.
    """
    gains, uses, odds, predicted, weights, moments, known = _state(
        state, num_layers, reach, num_kinds, num_experts
    )
    _visit(selected, layer, learns, gains, uses, odds, predicted, weights, moments, known)
    token_odds = np.empty(num_experts, np.float32)
    best = np.empty(top_k + 1, np.float32)
    proposed = np.empty(reach * num_experts, np.int64)
    num_proposed = 0
    for ahead in range(reach):
        target = (layer + 1 + ahead) % num_layers
        is_in_pass = layer + 1 + ahead < num_layers
        own = known[target, ahead]
        kind = 3
        for expert in range(num_experts):
            own[0, expert] = 1
        _hear(routers, ahead, is_in_pass, last, top_k, token_odds, best, own[1:3])
        if len(fitted):
            _hear(fitted, ahead, is_in_pass, last, top_k, token_odds, best, own[3:5])
            kind = 5
        for frequency in range(odds.shape[1]):
            for expert in range(num_experts):
                own[kind + frequency, expert] = odds[target, frequency, expert]
        if len(mapped):
            for expert in range(num_experts):
                own[num_kinds - 1, expert] = mapped[ahead, expert]
        chances = predicted[target, ahead]
        _predict(weights[target, ahead], own, chances)
        num_proposed = _propose(
            chances, far if ahead else floor, target * num_experts, num_proposed, proposed
        )
    return proposed[:num_proposed]

"""The compiled loops of horizon; `tests/runtime/policies/horizon_reference.py` computes the same in
plain numpy.

Shapes: L layers, E experts, F features of a key, N tokens remembered. A remembered token has a
place by its age, 0 the newest, and a slot in a ring in which newer tokens stand before older ones:
`slot = (newest + age) % N`.
"""

import numpy as np

from artifacts.common.numba_loops import kernel, part

LATER = 0.85  # weight of a pass of waiting against the one before it
LONGEST = 1 / (1 - LATER)  # the wait, in passes, for what is never used again
DISCOUNT = 0.45  # weight of the token after next that follows a token, against the next
LAGS = 4  # how many tokens later an expert still counts as following a token
# running frequencies of a key, and its features
NUM_RUNNING = 5
NUM_KINDS = 8
_VECTOR = 64
# expected steps are rounded to one in so many, so that values which differ by rounding errors tie
_GRAIN = 16


@part
def _dot(values, is_set):
    total = np.float32(0)
    for i in range(len(is_set)):
        total += values[i] * np.float32(is_set[i])
    return total


@part
def _add(counts, is_set):
    for i in range(len(is_set)):
        counts[i] += is_set[i]


@part
def _compare(newest, remembered, common, in_common):
    """Update `common` [n] by age, the experts of this layer that each remembered token has in
    common with the newest, and `in_common` [n], the sum over all layers."""
    # tokens from this age on stand at the start of the ring
    split = min(remembered.shape[1] - newest, len(common))
    for age in range(len(common)):
        in_common[age] -= common[age]
        common[age] = 0
    for expert in range(len(remembered)):
        row = remembered[expert]
        if row[newest]:
            _add(common[:split], row[newest : newest + split])
            _add(common[split:], row[: len(common) - split])
    for age in range(len(common)):
        in_common[age] += common[age]


@part
def _weigh(common, in_common, like, num_slots):
    """Return weights [n + LAGS] of the tokens by age: `like` [C], by how many experts fewer than
    the best the token has in common with the newest. Before the first token there are tokens with
    nothing in common, as far as there are slots."""
    # narrow integers, so that more of them fit a vector
    most = np.int16(0)
    last = np.int16(len(like) - 1)
    for age in range(1, len(common)):  # age 0 is the newest itself
        most = max(most, np.int16(in_common[age] + common[age]))
    weights = np.zeros(len(common) + LAGS, np.float32)
    beyond = like[min(most, last)]
    for age in range(len(common)):
        less = np.int16(most - in_common[age] - common[age])
        weights[age] = like[np.uint16(min(max(less, np.int16(0)), last))]
    for age in range(len(common), min(len(weights), num_slots)):
        weights[age] = beyond
    return weights


@part
def _follow(newest, weights, remembered, mean, followers):
    """Set `followers` [E] to how often each expert followed tokens similar to the newest, or to
    `mean` [E] if few are similar.

    A token has the weights of the tokens before it, discounted by their distance.
    """
    num_tokens = len(weights) - LAGS
    num_slots = remembered.shape[1]
    counts = np.zeros(num_tokens, np.float32)
    for lag in range(1, LAGS + 1):
        discount = np.float32(DISCOUNT ** (lag - 1))
        before = weights[lag:]
        for age in range(num_tokens):
            counts[age] += discount * before[age]
    total = np.float32(0)
    for age in range(num_tokens):
        total += counts[age]
    # The ring fills from its end. Some empty slots before the first token complete the last vector
    # of the sum.
    first = num_slots - min(-(-num_tokens // _VECTOR) * _VECTOR, num_slots)
    split = min(num_slots - newest, num_tokens)
    by_slot = np.zeros(num_slots - first, np.float32)
    for age in range(num_tokens):
        by_slot[newest - first + age if age < split else age - split] = counts[age]
    for expert in range(len(followers)):
        followed = _dot(by_slot, remembered[expert, first:])
        followers[expert] = (followed + 0.5 * mean[expert]) / (total + 0.5)


@part
def _observe(known, used, moments, products):
    """Add an observation to the least squares `moments` [3, 3] and `products` [3]: features `known`
    [3, E] and use `used` [E]."""
    for kind in range(len(known)):
        for expert in range(len(used)):
            products[kind] += known[kind, expert] * used[expert]
        for other in range(len(known)):
            for expert in range(len(used)):
                moments[kind, other] += known[kind, expert] * known[other, expert]


@part
def _last_named(row, top_k, best):
    """Return the k-th largest value of `row`; `best` [top_k] is overwritten."""
    num_held = 0
    for place in range(len(row)):
        value = row[place]
        if num_held == top_k and value <= best[top_k - 1]:
            continue
        at = min(num_held, top_k - 1)
        while at > 0 and best[at - 1] < value:
            best[at] = best[at - 1]
            at -= 1
        best[at] = value
        num_held = min(num_held + 1, top_k)
    return best[top_k - 1]


@part
def _hear(row, top_k, best, known):
    """Add one token's prediction `row` [E] of a layer ahead to the features `known` [3, E]."""
    limit = _last_named(row, top_k, best)
    for expert in range(len(row)):
        if row[expert] >= limit:
            known[0, expert] = 1
        known[1, expert] *= 1 - min(row[expert] * top_k, 1)


@part
def _near(step):
    return -np.rint(step * _GRAIN) / _GRAIN


@part
def _expect(visit, num_layers, weights, known, wait, nearness):
    """Set `nearness` [E] of a layer that is visited in step `visit`, from its features `known` [3,
    E] and its waits."""
    for expert in range(len(wait)):
        known[1, expert] = 1 - known[1, expert]
        known[2, expert] = (
            1 / wait[expert] - 1 / LONGEST
        ) / LATER  # the steady rate of use that has this wait
        chance = (
            weights[0] * known[0, expert]
            + weights[1] * known[1, expert]
            + weights[2] * known[2, expert]
        )
        nearness[expert] = _near(visit + (1 - min(max(chance, 0), 1)) * num_layers * wait[expert])


@kernel(
    "void(int64, int64, int64, float64[:, :, ::1], int64[::1], float64[:, ::1], float64[:, ::1], "
    "float64[:, ::1],float64[:, ::1], float64[:, :, :, ::1], float64[:, ::1], float64[:, :, ::1], "
    "float64[:, ::1])"
)
def look_ahead(
    layer,
    step,
    top_k,
    predicted,
    last,
    used,
    waits,
    nearness,
    is_pending,
    known,
    weights,
    moments,
    products,
):
    """Predict the visits of the layers ahead from `predicted` [T, D, E]; past the last layer only
    the tokens `last` count. Compare what this layer `used` [L, E] with what was predicted of it.

    `known` [D, L, 3, E]: for each expert whether some token has it among its k, how likely some
    token selects it, and the rate behind its wait in `waits` [L, E]. `weights` [D, 3] turn this
    into the chance of use at the visit, and that into `nearness` [L, E]. `is_pending` [D, L], 1:
    predictions not yet compared, for `moments` [D, 3, 3] and `products` [D, 3].
    """
    num_layers, num_experts = waits.shape
    best = np.empty(top_k)
    for ahead in range(len(known)):
        if is_pending[ahead, layer] > 0:
            is_pending[ahead, layer] = 0
            _observe(known[ahead, layer], used[layer], moments[ahead], products[ahead])
    for ahead in range(predicted.shape[1]):
        target = (layer + 1 + ahead) % num_layers
        own = known[ahead, target]
        is_pending[ahead, target] = 1
        for expert in range(num_experts):
            own[0, expert] = 0
            own[1, expert] = 1
        if layer + 1 + ahead < num_layers:
            for token in range(len(predicted)):
                _hear(predicted[token, ahead], top_k, best, own)
        else:
            for request in range(len(last)):
                _hear(predicted[last[request], ahead], top_k, best, own)
        _expect(step + 1 + ahead, num_layers, weights[ahead], own, waits[target], nearness[target])


@part
def _mark(keys, first_key, used):
    """Set `used` [E] to 1 for the experts of `keys`, to 0 for the others."""
    for expert in range(len(used)):
        used[expert] = 0
    for place in range(len(keys)):
        used[keys[place] - first_key] = 1


@part
def _wait(weights, levels, known, wait):
    """Set the features `known` [F, E], 1 and the roots of `levels` [F - 1, E], and `wait` [E],
    linear in them and clipped to its limits."""
    known[0] = 1
    wait[:] = weights[0]
    for kind in range(1, len(weights)):
        for expert in range(len(wait)):
            known[kind, expert] = np.sqrt(levels[kind - 1, expert])
            wait[expert] += weights[kind] * known[kind, expert]
    for expert in range(len(wait)):
        wait[expert] = min(max(wait[expert], 1), LONGEST)


@part
def _state(block, num_layers, num_experts):
    """Return the parts of the block that `on_use` describes."""
    gains = block[:NUM_RUNNING]
    weights = block[NUM_RUNNING : NUM_RUNNING + NUM_KINDS]
    start = NUM_RUNNING + NUM_KINDS
    size = num_layers * num_experts
    share = block[start : start + num_experts]
    start = start + num_experts
    by_layer = block[start : start + 3 * size].reshape((3, num_layers, num_experts))
    start, end = start + 3 * size, start + (NUM_KINDS + 2) * size
    levels = block[start:end].reshape((num_layers, NUM_KINDS - 1, num_experts))
    known = block[end:].reshape((num_layers, NUM_KINDS, num_experts))
    return gains, weights, share, by_layer[0], by_layer[1], by_layer[2], levels, known


@part
def _state_ahead(block, distance, num_layers, num_experts):
    """Return the last five arguments of `look_ahead`."""
    visits = distance * num_layers
    is_pending = block[:visits].reshape((distance, num_layers))
    start = visits
    weights = block[start : start + 3 * distance].reshape((distance, 3))
    start = start + 3 * distance
    moments = block[start : start + 9 * distance].reshape((distance, 3, 3))
    start = start + 9 * distance
    products = block[start : start + 3 * distance].reshape((distance, 3))
    start = start + 3 * distance
    return (
        is_pending,
        block[start:].reshape((distance, num_layers, 3, num_experts)),
        weights,
        moments,
        products,
    )


@kernel(
    "void(int64[::1], int64, int64, int64, int64, boolean, boolean, int64, float32[:, :, ::1], "
    "int64[::1],float64[::1], uint8[:, :, ::1], int16[:, ::1], float32[:, ::1], int64, "
    "float64[::1])"
)
def on_use(
    keys, layer, step, newest, num_tokens, is_single, is_remembered, top_k, predicted, last,
    state, remembered, common, like, distance, state_ahead
):  # fmt: skip
    """Note that a step uses `keys` of a layer. It `is_single` if it has one token. Its tokens are
    remembered already if it `is_remembered`, else they are here, as one.

    `state` is one block with these parts: `gains` [NUM_RUNNING] of the running frequencies;
    `weights` [F] of the features; `share` [E] of a larger step's tokens that used each expert;
    `used` [L, E]; `waits` [L, E] for the next use, in passes; `nearness` [L, E], minus the step of
    the expected next use; `levels` [L, F - 1, E], the running frequencies and how often each expert
    followed; and the features `known` [L, F, E].

    `remembered` [L, E, N]; `common` [L + 1, N], by layer and in all; `like` [R, C], a row for each
    level of followers. `state_ahead`, for `distance` layers ahead, is a block of the last arguments
    of `look_ahead`: `is_pending`, `weights`, `moments`, `products`, `known`. All but `gains`,
    `weights`, `share` and `like` are updated.
    """
    num_layers, num_experts = remembered.shape[:2]
    gains, weights, share, used, waits, nearness, levels, known = _state(
        state, num_layers, num_experts
    )
    own = levels[layer]
    common_here = common[layer, :num_tokens]
    in_common = common[num_layers, :num_tokens]
    _mark(keys, layer * num_experts, used[layer])
    if is_single:
        share = used[layer]
    if not is_remembered:
        for expert in range(num_experts):
            remembered[layer, expert, newest] = np.uint8(used[layer, expert])
    for kind in range(NUM_RUNNING):
        for expert in range(num_experts):
            own[kind, expert] += gains[kind] * (share[expert] - own[kind, expert])
    _compare(newest, remembered[layer], common_here, in_common)
    for kind in range(len(like)):
        alike = _weigh(common_here, in_common, like[kind], common.shape[1])
        _follow(newest, alike, remembered[layer], own[NUM_RUNNING - 1], own[NUM_RUNNING + kind])
    _wait(weights, own, known[layer], waits[layer])
    for expert in range(num_experts):
        nearness[layer, expert] = _near(step + num_layers * waits[layer, expert])
    if distance:
        ahead = _state_ahead(state_ahead, distance, num_layers, num_experts)
        said = predicted.astype(np.float64)
        look_ahead(layer, step, top_k, said, last, used, waits, nearness, *ahead)


@kernel(
    "void(float64[::1], float64[:, :, ::1], float64[:, :, ::1], float64[:, ::1], float64[:, ::1], "
    "float64[::1])"
)
def learn(weights, known, later, used, moments, products):
    """Add a pass to `moments` [F, F] and `products` [F]: the wait after the features `known` [L, F,
    E] is this pass and, for what it did not use (`used` [L, E]), LATER of the wait after `later`
    (least-squares temporal differences, Bradtke and Barto 1996)."""
    num_layers, num_kinds, num_experts = known.shape
    weighed = np.empty((num_kinds, num_experts))
    change = np.empty((num_kinds, num_experts))
    for layer in range(num_layers):
        wait = np.zeros(num_experts)
        for kind in range(num_kinds):
            for expert in range(num_experts):
                wait[expert] += weights[kind] * known[layer, kind, expert]
        for kind in range(num_kinds):
            for expert in range(num_experts):
                weighed[kind, expert] = known[layer, kind, expert] / min(
                    max(wait[expert], 1), LONGEST
                )
                left = LATER * (1 - used[layer, expert]) * later[layer, kind, expert]
                change[kind, expert] = known[layer, kind, expert] - left
        for kind in range(num_kinds):
            for expert in range(num_experts):
                products[kind] += weighed[kind, expert]
            for other in range(num_kinds):
                moment = 0.0
                for expert in range(num_experts):
                    moment += weighed[kind, expert] * change[other, expert]
                moments[kind, other] += moment

"""The compiled loops of horizon; `tests/runtime/policies/horizon_reference.py` computes the same in
plain floating point, and `horizon.h` the same integers in C.

What decides without predictions is integer arithmetic, so that every machine and compiler decides
alike: shares and frequencies count in units of 1 / SURE, waits, features and weights in units of
1 / ONE, similarities in units of 1 / ALIKE.

Shapes: L layers, E experts, F features of a key, N tokens remembered. A remembered token has a
place by its age, 0 the newest, and a slot in a ring in which newer tokens stand before older ones:
`slot = (newest + age) % N`.
"""

import numpy as np

from artifacts.common.numba_loops import kernel, part

SURE = 1 << 30
ONE = 1 << 24
ALIKE = 1 << 20
LATER = 0.85  # weight of a pass of waiting against the one before it
LONGEST = 1 / (1 - LATER)  # the wait, in passes, for what is never used again
_LATER = 14260634  # the same in units of 1 / ONE
MOST = 111848107
# in 1024ths, how much an expert counts as following a token with 0 to 3 between: powers of .45
_DISCOUNTS = (1024, 461, 207, 93)
LAGS = len(_DISCOUNTS)
# running frequencies of a key, and its features
NUM_RUNNING = 5
NUM_KINDS = 8
_VECTOR = 64
# expected steps are rounded to one in so many, so that values which differ by rounding errors tie
_GRAIN = 16


@part
def _dot(values, is_set):
    total = np.int32(0)
    for i in range(len(is_set)):
        total += values[i] & -np.int32(is_set[i])
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
    weights = np.zeros(len(common) + LAGS, np.int32)
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

    A token has the weights of the tokens before it, discounted by their distance: less than 2
    ALIKE, so that 1024 tokens fit 31 bits.
    """
    num_tokens = len(weights) - LAGS
    num_slots = remembered.shape[1]
    counts = np.zeros(num_tokens, np.int32)
    for lag in range(LAGS):
        discount = np.int32(_DISCOUNTS[lag])
        before = weights[lag + 1 :]
        for age in range(num_tokens):
            counts[age] += discount * before[age]
    total = np.int64(ALIKE // 2)
    for age in range(num_tokens):
        counts[age] >>= 10
        total += counts[age]
    # The ring fills from its end. Some empty slots before the first token complete the last vector
    # of the sum.
    first = num_slots - min(-(-num_tokens // _VECTOR) * _VECTOR, num_slots)
    split = min(num_slots - newest, num_tokens)
    by_slot = np.zeros(num_slots - first, np.int32)
    for age in range(num_tokens):
        by_slot[newest - first + age if age < split else age - split] = counts[age]
    for expert in range(len(followers)):
        followed = np.int64(_dot(by_slot, remembered[expert, first:]))
        followers[expert] = (followed * SURE + mean[expert] * (ALIKE // 2)) // total


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
        passes = wait[expert] / ONE
        known[2, expert] = (
            1 / passes - 1 / LONGEST
        ) / LATER  # the steady rate of use that has this wait
        chance = (
            weights[0] * known[0, expert]
            + weights[1] * known[1, expert]
            + weights[2] * known[2, expert]
        )
        nearness[expert] = _near(visit + (1 - min(max(chance, 0), 1)) * num_layers * passes)


@kernel(
    "void(int64, int64, int64, float64[:, :, ::1], int64[::1], int64[:, ::1], int64[:, ::1], "
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
def _roots(levels, roots):
    """Set `roots` [E] in units of 1 / ONE to the square roots of `levels` [E] in units of 1 / SURE.

    They are the integers below the roots: of less than 50 bits, a correctly rounded root of a float
    is above the same integer.
    """
    for expert in range(len(roots)):
        roots[expert] = np.int64(np.sqrt(np.float64(levels[expert] << 18)))


@part
def _wait(weights, levels, known, wait):
    """Set the features `known` [F, E], 1 and the roots of `levels` [F - 1, E], and `wait` [E],
    linear in them and clipped to its limits."""
    known[0] = ONE
    wait[:] = weights[0] * ONE
    for kind in range(1, len(weights)):
        _roots(levels[kind - 1], known[kind])
        for expert in range(len(wait)):
            wait[expert] += weights[kind] * known[kind, expert]
    for expert in range(len(wait)):
        wait[expert] = min(max(wait[expert] >> 24, ONE), MOST)


@part
def _state(block, num_layers, num_experts):
    """Return the parts of the block that `on_use` describes."""
    gains = block[:NUM_RUNNING]
    weights = block[NUM_RUNNING : NUM_RUNNING + NUM_KINDS]
    start = NUM_RUNNING + NUM_KINDS
    size = num_layers * num_experts
    share = block[start : start + num_experts]
    start = start + num_experts
    by_layer = block[start : start + 2 * size].reshape((2, num_layers, num_experts))
    start, end = start + 2 * size, start + (NUM_KINDS + 1) * size
    levels = block[start:end].reshape((num_layers, NUM_KINDS - 1, num_experts))
    known = block[end:].reshape((num_layers, NUM_KINDS, num_experts))
    return gains, weights, share, by_layer[0], by_layer[1], levels, known


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
    "int64[::1],int64[::1], float64[:, ::1], uint8[:, :, ::1], int16[:, ::1], int32[:, ::1], "
    "int64, float64[::1])"
)
def on_use(
    keys, layer, step, newest, num_tokens, is_single, is_remembered, top_k, predicted, last,
    state, nearness, remembered, common, like, distance, state_ahead
):  # fmt: skip
    """Note that a step uses `keys` of a layer. It `is_single` if it has one token. Its tokens are
    remembered already if it `is_remembered`, else they are here, as one.

    `state` is one block with these parts: `gains` [NUM_RUNNING] of the running frequencies;
    `weights` [F] of the features; `share` [E] of a larger step's tokens that used each expert;
    `used` [L, E]; `waits` [L, E] for the next use, in passes; `levels` [L, F - 1, E], the running
    frequencies and how often each expert followed; and the features `known` [L, F, E]. `nearness`
    [L, E] is minus the step of the expected next use.

    `remembered` [L, E, N]; `common` [L + 1, N], by layer and in all; `like` [R, C], a row for each
    level of followers. `state_ahead`, for `distance` layers ahead, is a block of the last arguments
    of `look_ahead`: `is_pending`, `weights`, `moments`, `products`, `known`. All but `gains`,
    `weights`, `share` and `like` are updated.
    """
    num_layers, num_experts = remembered.shape[:2]
    gains, weights, share, used, waits, levels, known = _state(state, num_layers, num_experts)
    own = levels[layer]
    common_here = common[layer, :num_tokens]
    in_common = common[num_layers, :num_tokens]
    _mark(keys, layer * num_experts, used[layer])
    if is_single:
        for expert in range(num_experts):
            share[expert] = used[layer, expert] * SURE
    if not is_remembered:
        for expert in range(num_experts):
            remembered[layer, expert, newest] = np.uint8(used[layer, expert])
    for kind in range(NUM_RUNNING):
        for expert in range(num_experts):
            own[kind, expert] += (gains[kind] * (share[expert] - own[kind, expert])) >> 30
    _compare(newest, remembered[layer], common_here, in_common)
    for kind in range(len(like)):
        alike = _weigh(common_here, in_common, like[kind], common.shape[1])
        _follow(newest, alike, remembered[layer], own[NUM_RUNNING - 1], own[NUM_RUNNING + kind])
    _wait(weights, own, known[layer], waits[layer])
    for expert in range(num_experts):
        ahead = (_GRAIN * num_layers * waits[layer, expert] + ONE // 2) >> 24
        nearness[layer, expert] = -(_GRAIN * step + ahead) / _GRAIN
    if distance:
        fitted = _state_ahead(state_ahead, distance, num_layers, num_experts)
        said = predicted.astype(np.float64)
        look_ahead(layer, step, top_k, said, last, used, waits, nearness, *fitted)


@part
def _shifted(first, second, bits):
    """Return `first * second >> bits` of a product of up to 126 bits, rounded towards zero."""
    a = np.uint64(abs(first))
    b = np.uint64(abs(second))
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    cross = (a & low) * (b & low)
    middle = (a >> half) * (b & low) + (cross >> half)
    other = (a & low) * (b >> half) + (middle & low)
    high = (a >> half) * (b >> half) + (middle >> half) + (other >> half)
    found = (high << np.uint64(64 - bits)) | (((other << half) | (cross & low)) >> np.uint64(bits))
    return np.int64(found) if (first < 0) == (second < 0) else -np.int64(found)


@part
def _ratio(over, under, bits):
    """Return `(over << bits) / under`, rounded towards zero, if that fits 63 bits."""
    left = np.uint64(abs(over))
    divisor = np.uint64(abs(under))
    found = left // divisor
    left %= divisor
    one = np.uint64(1)
    for _ in range(bits):
        left <<= one
        found <<= one
        if left >= divisor:
            left -= divisor
            found |= one
    return np.int64(found) if (over < 0) == (under < 0) else -np.int64(found)


@kernel("void(int64[:, ::1], int64[::1], int64[::1])")
def solve(moments, products, weights):
    """Set `weights` [F] to the solution of `moments` [F, F] times them = `products` [F], by
    elimination with the largest pivot. Both are halved when they grow beyond 56 bits."""
    num_kinds = len(weights)
    rows = np.empty((num_kinds, num_kinds + 1), np.int64)
    is_large = False
    for row in range(num_kinds):
        rows[row, num_kinds] = products[row]
        is_large |= abs(products[row]) >> 56 != 0
        for column in range(num_kinds):
            rows[row, column] = moments[row, column]
            is_large |= abs(moments[row, column]) >> 56 != 0
    for place in range(num_kinds):
        best = place
        for row in range(place + 1, num_kinds):
            if abs(rows[row, place]) > abs(rows[best, place]):
                best = row
        if rows[best, place] == 0:
            return
        for column in range(place, num_kinds + 1):
            held = rows[place, column]
            rows[place, column] = rows[best, column]
            rows[best, column] = held
        for row in range(place + 1, num_kinds):
            share = _ratio(rows[row, place], rows[place, place], 60)
            for column in range(place, num_kinds + 1):
                rows[row, column] -= _shifted(share, rows[place, column], 60)
    for place in range(num_kinds - 1, -1, -1):
        left = rows[place, num_kinds]
        for column in range(place + 1, num_kinds):
            left -= _shifted(rows[place, column], weights[column], 24)
        weights[place] = _ratio(left, rows[place, place], 24)
    if is_large:
        for row in range(num_kinds):
            products[row] >>= 1
            for column in range(num_kinds):
                moments[row, column] >>= 1


@kernel(
    "void(int64[::1], int64[:, :, ::1], int64[:, :, ::1], int64[:, ::1], int64[:, ::1], int64[::1])"
)
def learn(weights, known, later, used, moments, products):
    """Add a pass to `moments` [F, F] and `products` [F]: the wait after the features `known` [L, F,
    E] is this pass and, for what it did not use (`used` [L, E]), LATER of the wait after `later`
    (least-squares temporal differences, Bradtke and Barto 1996)."""
    num_layers, num_kinds, num_experts = known.shape
    weighed = np.empty((num_kinds, num_experts), np.int64)
    change = np.empty((num_kinds, num_experts), np.int64)
    for layer in range(num_layers):
        wait = np.zeros(num_experts, np.int64)
        for kind in range(num_kinds):
            for expert in range(num_experts):
                wait[expert] += weights[kind] * known[layer, kind, expert]
        for expert in range(num_experts):
            wait[expert] = ONE * ONE // min(max(wait[expert] >> 24, ONE), MOST)
        for kind in range(num_kinds):
            for expert in range(num_experts):
                weighed[kind, expert] = (known[layer, kind, expert] * wait[expert]) >> 24
                left = (_LATER * (1 - used[layer, expert]) * later[layer, kind, expert]) >> 24
                change[kind, expert] = known[layer, kind, expert] - left
        for kind in range(num_kinds):
            for expert in range(num_experts):
                products[kind] += weighed[kind, expert]
            for other in range(num_kinds):
                moment = np.int64(0)
                for expert in range(num_experts):
                    moment += (weighed[kind, expert] * change[other, expert]) >> 24
                moments[kind, other] += moment

"""A trace run through one pool of slots, compiled, for `runtime.replay.pool`.

Shapes: S steps, N rows, K experts of a token, one key for each layer and expert.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel

OWN = 0
ACCEPTED = 1
REJECTED = 2
_FINEST = 32  # ages are compared as integers, in 2^-32 of a token


@exact_part
def _victim(held, is_wanted, used_at, class_of, stepped, clocks, num_experts):
    """Return the slot of the key with the largest age / 2^class; ties go by the lower class, the
    older step, the lower key. Returns -1 where all are wanted."""
    best = -1
    oldest = np.int64(-1)
    for slot in range(len(held)):
        key = held[slot]
        if is_wanted[key]:
            continue
        age = (clocks[key // num_experts] - used_at[key]) << (_FINEST - class_of[key])
        if best >= 0:
            other = held[best]
            if age < oldest:
                continue
            if age == oldest:
                mine = (class_of[key], stepped[key], key)
                if mine > (class_of[other], stepped[other], other):
                    continue
        best = slot
        oldest = age
    return best


@exact_part
def _fetched(misses, ratio):
    """Return how many of the misses are loaded where link and near tier, which read the same
    memory, end soonest; ties go to the fewer (FreeToken)."""
    few = int(misses * ratio)
    before = max(few * (1 - ratio), (misses - few) * ratio)
    after = max((few + 1) * (1 - ratio), (misses - few - 1) * ratio)
    return min(misses, few + (after < before))


@exact_part
def _use(key, clock, step, rule, uses, class_of, used_at, stepped):
    """Note that a step uses a key, at the clock of its layer."""
    half_life, num_classes, _, _ = rule
    age = clock - used_at[key]
    uses[key] = uses[key] * 2.0 ** (-age / half_life) + 1
    class_of[key] = min(int(np.log2(uses[key])), int(num_classes) - 1)
    used_at[key] = clock
    stepped[key] = step


@kernel(
    "void(int64[::1], int64[::1], int64[::1], int64[:, ::1], int8[::1], int64, int64, boolean[::1],"
    " float64[::1], float64[::1], int64[:, ::1], float64[::1])",
    exact=True,
)
def follow(
    starts,
    layers,
    passes,
    experts,
    kinds,
    num_slots,
    num_experts,
    is_held,
    rule,
    costs,
    counts,
    s,
):
    """Run the steps, of which step i has the rows `starts[i]` to `starts[i + 1]` of `experts`
    [N, K], the layer `layers[i]` and the pass `passes[i]`, from an empty pool. Of `kinds` [N] a row
    OWN is used in its step, a draft that is ACCEPTED once the pass has ended, and any other draft
    never. Keys that are held beside the pool are true in
    `is_held`. `rule`: half-life, classes, share of the misses computed near, below 0 for the one
    that ends soonest, and the rate of the link over the near tier's. `costs`: seconds of the rest
    of a layer, of an expert, of a load, of an expert computed near, each once and for each token,
    the part of the near rate that is lost beside the link, and seconds of a step with near experts.
    Fills `counts` [S, 4] (experts wanted, misses, computed near, loads) and seconds `s` [S]."""
    _, _, near_share, ratio = rule
    rest_s, rest_token_s, expert_s, token_s, load_s, near_s, near_token_s, lost, near_step_s = costs
    num_keys = len(is_held)
    held = np.empty(num_slots, np.int64)
    num_held = 0
    due = 0.0  # loads that the share leaves and that were not whole yet
    is_wanted = np.zeros(num_keys, np.bool_)
    clocks = np.zeros(layers.max() + 1, np.int64)
    stepped = np.full(num_keys, -1, np.int64)
    asked = np.full(num_keys, -1, np.int64)  # the last step that wanted each key
    used_at = np.zeros(num_keys, np.int64)
    class_of = np.zeros(num_keys, np.int64)
    uses = np.zeros(num_keys)
    tokens = np.zeros(num_keys, np.int64)
    wanted = np.empty(num_experts, np.int64)
    missing = np.empty(num_experts, np.int64)
    before = np.empty(num_experts, np.int64)
    begin = 0  # of the pass
    for step in range(len(layers)):
        layer = layers[step]
        num_tokens = starts[step + 1] - starts[step]
        for row in range(starts[step], starts[step + 1]):
            clocks[layer] += kinds[row] == OWN
        num_wanted = 0
        num_missing = 0
        for row in range(starts[step], starts[step + 1]):
            for rank in range(experts.shape[1]):
                key = layer * num_experts + experts[row, rank]
                tokens[key] += 1
                if is_wanted[key]:
                    continue
                is_wanted[key] = True
                wanted[num_wanted] = key
                num_wanted += 1
                if not is_held[key]:
                    at = num_missing
                    if near_share < 0.0:  # those that were used last are loaded
                        mine = (-asked[key], key)
                        while at and mine < (-before[at - 1], missing[at - 1]):
                            missing[at] = missing[at - 1]
                            before[at] = before[at - 1]
                            at -= 1
                    missing[at] = key
                    before[at] = asked[key]
                    num_missing += 1
                asked[key] = step
            for rank in range(experts.shape[1] * (kinds[row] == OWN)):
                key = layer * num_experts + experts[row, rank]
                if stepped[key] < step:
                    _use(key, clocks[layer], step, rule, uses, class_of, used_at, stepped)
        num_loads = num_missing
        if near_share < 0.0:
            num_loads = _fetched(num_missing, ratio)
        elif num_held == num_slots:  # a pool that is not full takes every miss
            due += (1.0 - near_share) * num_missing
            num_loads = int(due + 1e-9)
            due -= num_loads
        num_near = num_missing - num_loads
        now_s = 0.0
        near_end_s = near_step_s if num_near else 0.0
        for place in range(num_wanted):
            key = wanted[place]
            if is_held[key]:
                now_s += max(expert_s, tokens[key] * token_s)
        for place in range(num_missing):
            key = missing[place]
            if place < num_loads:
                now_s = max(now_s, (place + 1) * load_s) + max(expert_s, tokens[key] * token_s)
            else:
                near_end_s += max(near_s, tokens[key] * near_token_s)
        if lost > 0.0 and num_near:
            near_end_s += lost * min(num_loads * load_s, near_end_s / (1.0 - lost))
        s[step] = max(rest_s, num_tokens * rest_token_s) + max(now_s, near_end_s)
        for place in range(num_loads):
            if num_held < num_slots:
                slot = num_held
                num_held += 1
            elif num_slots:
                slot = _victim(held, is_wanted, used_at, class_of, stepped, clocks, num_experts)
                if slot < 0:
                    break
                is_held[held[slot]] = False
            else:
                break
            held[slot] = missing[place]
            is_held[missing[place]] = True
        for place in range(num_wanted):
            is_wanted[wanted[place]] = False
            tokens[wanted[place]] = 0
        counts[step, 0] = num_wanted
        counts[step, 1] = num_missing
        counts[step, 2] = num_near
        counts[step, 3] = num_loads
        if step + 1 < len(layers) and passes[step + 1] == passes[step]:
            continue
        for row in range(starts[begin], starts[step + 1]):
            while row >= starts[begin + 1]:
                begin += 1
            if kinds[row] != ACCEPTED:
                continue
            layer = layers[begin]
            clocks[layer] += 1
            for rank in range(experts.shape[1]):
                key = layer * num_experts + experts[row, rank]
                _use(key, clocks[layer], step, rule, uses, class_of, used_at, stepped)
        begin = step + 1

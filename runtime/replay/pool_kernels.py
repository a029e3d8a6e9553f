"""A trace run through one pool of slots, compiled, for `runtime.replay.pool`.

Shapes: S steps, N rows, K experts of a token, one key for each layer and expert.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel

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


@kernel(
    "void(int64[::1], int64[::1], int64[:, ::1], int64, int64, int64, float64[::1], float64[::1], "
    "int64[:, ::1], float64[::1])",
    exact=True,
)
def follow(starts, layers, experts, num_slots, num_experts, num_held_keys, rule, costs, counts, s):
    """Run the steps, of which step i has the rows `starts[i]` to `starts[i + 1]` of `experts`
    [N, K] and the layer `layers[i]`, from an empty pool; the last `num_held_keys` keys are held
    beside it. `rule`: half-life, classes, share of the misses computed near. `costs`: seconds of
    the rest of a layer, of an expert, of a load, of an expert computed near, each once and for each
    token, the part of the near rate that is lost beside the link, and seconds of a step with near
    experts. Fills `counts` [S, 4] (experts wanted, misses, computed near, loads) and seconds `s`
    [S]."""
    half_life, num_classes, near_share = rule
    rest_s, rest_token_s, expert_s, token_s, load_s, near_s, near_token_s, lost, near_step_s = costs
    num_keys = (layers.max() + 1) * num_experts
    held = np.empty(min(num_slots, num_keys - num_held_keys), np.int64)
    num_held = 0
    debt_s = 0.0  # that the link goes on with what was loaded behind
    is_held = np.arange(num_keys) >= num_keys - num_held_keys
    is_wanted = np.zeros(num_keys, np.bool_)
    clocks = np.zeros(layers.max() + 1, np.int64)
    stepped = np.full(num_keys, -1, np.int64)
    used_at = np.zeros(num_keys, np.int64)
    class_of = np.zeros(num_keys, np.int64)
    uses = np.zeros(num_keys)
    tokens = np.zeros(num_keys, np.int64)
    wanted = np.empty(num_experts, np.int64)
    missing = np.empty(num_experts, np.int64)
    for step in range(len(layers)):
        layer = layers[step]
        num_tokens = starts[step + 1] - starts[step]
        clocks[layer] += num_tokens
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
                    missing[num_missing] = key
                    num_missing += 1
                age = clocks[layer] - used_at[key]
                uses[key] = uses[key] * 2.0 ** (-age / half_life) + 1
                class_of[key] = min(int(np.log2(uses[key])), int(num_classes) - 1)
                used_at[key] = clocks[layer]
                stepped[key] = step
        num_near = int(near_share * num_missing + 0.5)
        num_waited = num_missing - num_near
        begin_s = rest_s if rest_s > num_tokens * rest_token_s else num_tokens * rest_token_s
        debt_s = max(0.0, debt_s - begin_s)
        now_s = 0.0
        near_end_s = 0.0
        for place in range(num_wanted):
            key = wanted[place]
            if is_held[key]:
                now_s += max(expert_s, tokens[key] * token_s)
        for place in range(num_missing):
            key = missing[place]
            if place < num_waited:
                now_s = max(now_s, debt_s + (place + 1) * load_s) + max(
                    expert_s, tokens[key] * token_s
                )
            else:
                near_end_s += max(near_s, tokens[key] * near_token_s)
        if num_near:
            near_end_s += near_step_s
        if lost > 0.0 and num_near:
            busy_s = debt_s + num_missing * load_s if len(held) else 0.0
            near_end_s += lost * min(busy_s, near_end_s / (1.0 - lost))
        s[step] = begin_s + max(now_s, near_end_s)
        left_s = max(now_s, near_end_s) - debt_s - num_waited * load_s
        num_behind = min(num_near, int(left_s / load_s) + 1) if left_s > 0.0 and len(held) else 0
        debt_s = max(0.0, num_behind * load_s - left_s)
        num_loads = num_waited + num_behind
        for place in range(num_loads):
            if num_held < len(held):
                slot = num_held
                num_held += 1
            else:
                slot = _victim(held, is_wanted, used_at, class_of, stepped, clocks, num_experts)
                if slot < 0:
                    num_loads = place
                    break
                is_held[held[slot]] = False
            held[slot] = missing[place]
            is_held[missing[place]] = True
        for place in range(num_wanted):
            is_wanted[wanted[place]] = False
            tokens[wanted[place]] = 0
        counts[step, 0] = num_wanted
        counts[step, 1] = num_missing
        counts[step, 2] = num_near
        counts[step, 3] = num_loads

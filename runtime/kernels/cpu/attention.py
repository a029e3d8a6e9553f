"""One token's attention over a cache of keys and values, compiled by numba. Importing this module imports numba.

Scores and sums are float32 without rounding in between. Numbers are read and written in place, by address, and `like`
is an array of their type, uint16 for bfloat16, int16 for float16. Shapes: N heads, D numbers of a head, R of them
rotated, S positions.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import LIKE, as_float, part, pointer, rounded
from runtime.kernels.cpu.norms import FLOATS, read, scale_to_unit, write

f32 = np.float32
BOOLS = np.empty(0, np.uint8)


@part
def _read_floats(address, count, is_float32, like):
    return read(address, count, FLOATS) if is_float32 else read(address, count, like)


@part
def _normalise(values, span, weights, eps, is_rounded, like):
    """Normalise each `span` of the values by the same weights; 0: nothing."""
    for start in range(0, len(values) if span else 0, max(span, 1)):
        own = values[start : start + span]
        scale_to_unit(own, carray(pointer(weights, FLOATS), span), eps, is_rounded, like)


@part
def _turned(x, cos, other, sin, is_wide, like):
    """Return x * cos + other * sin, with products rounded too unless `is_wide`."""
    if is_wide:
        return rounded(x * cos + other * sin, like)
    return rounded(rounded(x * cos, like) + rounded(other * sin, like), like)


@part
def _rotate(row, half, cos, sin, is_paired, is_each, is_wide, like):
    """Rotate the first R = 2 * half numbers of a head: neighbours if `is_paired`, otherwise the first half with the
    second. If `is_each`, every number has its own angle in cos and sin [R], otherwise pair i has angle i."""
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if is_paired else (i, i + half)
        of_a, of_b = (a, b) if is_each else (i, i)
        first, second = row[a], row[b]
        row[a] = _turned(first, cos[of_a], -second, sin[of_a], is_wide, like)
        row[b] = _turned(second, cos[of_b], first, sin[of_b], is_wide, like)


_NORM = "int64, int64, float32, boolean, boolean"  # span, weights, eps, is_rounded, is_late
_ROPE = "boolean, boolean, boolean, boolean"  # is_paired, is_each, is_wide, is_float32
_TURN = "int64, int64, int64, int64"  # half, angles, cos, sin
_PLACES = "int64, int64, int64"  # x, out, step


@kernel([f"void(int64, int64, {_NORM}, {_ROPE}, {_TURN}, {_PLACES}, {like})" for like in LIKE], nogil=True)
def prepare_heads(
    heads,
    dim,
    span,
    weights,
    eps,
    is_rounded,
    is_late,
    is_paired,
    is_each,
    is_wide,
    is_float32,
    half,
    angles,
    cos,
    sin,
    x,
    out,
    step,
    like,
):
    """Normalise and rotate heads x [N, D] and write them to `out`, where they begin `step` numbers apart. The norm
    comes after the rotation if `is_late`. There are `angles` numbers at cos and at sin, float32 if `is_float32`."""
    values = read(x, heads * dim, like)
    if not is_late:
        _normalise(values, span, weights, eps, is_rounded, like)
    cosines, sines = _read_floats(cos, angles, is_float32, like), _read_floats(sin, angles, is_float32, like)
    for head in range(heads):
        _rotate(values[head * dim : (head + 1) * dim], half, cosines, sines, is_paired, is_each, is_wide, like)
    if is_late:
        _normalise(values, span, weights, eps, is_rounded, like)
    for head in range(heads):
        write(values[head * dim : (head + 1) * dim], out + head * step * like.itemsize, like)


@part
def _softmax(scores, sink):
    """Turn scores [S] into weights in place. A sink takes its share of them; minus infinity: there is none."""
    most, total = sink, f32(0)
    for s in range(len(scores)):
        most = max(most, scores[s])
    for s in range(len(scores)):
        scores[s] = np.exp(scores[s] - most)
        total += scores[s]
    total += np.exp(sink - most)
    for s in range(len(scores)):
        scores[s] /= total


@part
def _bias(mask, is_bool, s, length, like):
    """What a mask of this address adds to the score of position s."""
    if mask == 0:
        return f32(0)
    if is_bool:
        return f32(0) if carray(pointer(mask, BOOLS), length)[s] else f32(-np.inf)
    return as_float(carray(pointer(mask, like), length)[s])


_SHAPE = "int64, int64, int64, int64, float32, int64"  # heads, groups, dim, value_dim, scaling, sinks
_CACHE = "int64, int64, int64, int64, int64"  # keys, key_step, values, value_step, length


@kernel([f"void({_SHAPE}, int64, {_CACHE}, int64, boolean, int64, {like})" for like in LIKE], nogil=True)
def attend(
    heads,
    groups,
    dim,
    value_dim,
    scaling,
    sinks,
    q,
    keys,
    key_step,
    values,
    value_step,
    length,
    mask,
    is_bool,
    out,
    like,
):
    """Write out [N, V]: the attention of heads q [N, D] to the S positions of keys [N / groups, S, D] and values
    [N / groups, S, V], heads of which lie `key_step` and `value_step` numbers apart. The mask [S], boolean or added to
    the scores, and sinks [N], float32, are absent where their address is 0."""
    queries, result = read(q, heads * dim, like), np.zeros(heads * value_dim, np.float32)
    scores = np.empty(length, np.float32)
    for head in range(heads):
        query, key_head = queries[head * dim : (head + 1) * dim], head // groups
        own_keys = carray(pointer(keys + key_head * key_step * like.itemsize, like), (length, dim))
        for s in range(length):
            score = f32(0)
            for d in range(dim):
                score += query[d] * as_float(own_keys[s, d])
            scores[s] = score * scaling + _bias(mask, is_bool, s, length, like)
        _softmax(scores, carray(pointer(sinks, FLOATS), heads)[head] if sinks else f32(-np.inf))
        own_values = carray(pointer(values + key_head * value_step * like.itemsize, like), (length, value_dim))
        own = result[head * value_dim : (head + 1) * value_dim]
        for s in range(length):
            for d in range(value_dim):
                own[d] += scores[s] * as_float(own_values[s, d])
    write(result, out, like)

"""Attention of one token over a cache of keys and values, compiled by numba. Importing this module
imports numba.

Scores and sums are float32 without rounding in between. Numbers are read and written in place, by
address, and `like` is an array of their type, uint16 for bfloat16, int16 for float16. Shapes: N
heads, D numbers of a head, R of them rotated, S positions.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from artifacts.common.numba_loops import part as called_part
from runtime.kernels.cpu.decoder.norms import FLOATS, read, scale_to_unit, write
from runtime.kernels.cpu.gated import LIKE, as_float, part, pointer, rounded

f32 = np.float32
BOOLS = np.empty(0, np.uint8)


@part
def _read_floats(address, count, is_float32, like):
    return read(address, count, FLOATS) if is_float32 else read(address, count, like)


@part
def _normalise(values, span, weights, eps, is_rounded, like):
    """Normalise each run of `span` values by the same weights, in place; do nothing if `span` is
    0."""
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
    """Rotate the first R = 2 * half numbers of a head: neighbours if `is_paired`, otherwise the
    first half with the second. If `is_each`, every number has its own angle in cos and sin [R],
    otherwise pair i has angle i."""
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if is_paired else (i, i + half)
        of_a, of_b = (a, b) if is_each else (i, i)
        first = row[a]
        second = row[b]
        row[a] = _turned(first, cos[of_a], -second, sin[of_a], is_wide, like)
        row[b] = _turned(second, cos[of_b], first, sin[of_b], is_wide, like)


# span (0: no norm), address of weights, eps, is_rounded
NORM = "Tuple((int64, int64, float64, boolean))"
ORDER = "UniTuple(boolean, 4)"  # is_late, is_paired, is_each, is_wide
TURN = "UniTuple(int64, 5)"  # is_float32, half, number of angles, addresses of cos and sin


@called_part
def prepare(values, dim, norm, order, turn, like):
    """Normalise and rotate heads, values [N * D], in place. The norm comes after the rotation if
    `is_late`."""
    span, weights, eps, is_rounded = norm
    is_late, is_paired, is_each, is_wide = order
    is_float32, half, angles, cos, sin = turn
    if not is_late:
        _normalise(values, span, weights, f32(eps), is_rounded, like)
    cosines = _read_floats(cos, angles, is_float32, like)
    sines = _read_floats(sin, angles, is_float32, like)
    for start in range(0, len(values), dim):
        _rotate(
            values[start : start + dim], half, cosines, sines, is_paired, is_each, is_wide, like
        )
    if is_late:
        _normalise(values, span, weights, f32(eps), is_rounded, like)


@called_part
def place(values, dim, out, step, like):
    """Write heads, values [N * D], to `out`, where they begin `step` numbers apart."""
    for head in range(len(values) // dim):
        write(values[head * dim : (head + 1) * dim], out + head * step * like.itemsize, like)


@kernel(
    [f"void(int64, int64, {NORM}, {ORDER}, {TURN}, int64, int64, int64, {like})" for like in LIKE],
    nogil=True,
)
def prepare_heads(heads, dim, norm, order, turn, x, out, step, like):
    """Normalise and rotate heads x [N, D] and write them to `out`, where they begin `step` numbers
    apart."""
    values = read(x, heads * dim, like)
    prepare(values, dim, norm, order, turn, like)
    place(values, dim, out, step, like)


@called_part
def _softmax(scores, sink):
    """Turn scores [S] into weights in place. A sink takes its share of them; minus infinity means
    that there is no sink."""
    most = sink
    total = f32(0)
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
    """Return the number that the mask at this address adds to the score of position s, 0 without a
    mask."""
    if mask == 0:
        return f32(0)
    if is_bool:
        return f32(0) if carray(pointer(mask, BOOLS), length)[s] else f32(-np.inf)
    return as_float(carray(pointer(mask, like), length)[s])


SIZES = "UniTuple(int64, 4)"  # heads, groups, dim, value_dim
CACHE = "UniTuple(int64, 5)"  # keys, key_step, values, value_step, length
MASK = "UniTuple(int64, 2)"  # address, is_bool


@called_part
def attended(queries, sizes, scaling, sinks, cache, mask, like):
    """Return [N * V]: the attention of heads, queries [N * D], to S positions.

    Keys are [N / groups, S, D] and values [N / groups, S, V]; their heads lie `key_step` and
    `value_step` numbers apart. The mask [S], boolean or added to the scores, and sinks [N],
    float32, are absent if their address is 0."""
    heads, groups, dim, value_dim = sizes
    keys, key_step, values, value_step, length = cache
    at_mask, is_bool = mask
    result = np.zeros(heads * value_dim, np.float32)
    scores = np.empty(length, np.float32)
    for head in range(heads):
        query = queries[head * dim : (head + 1) * dim]
        key_head = head // groups
        own_keys = carray(pointer(keys + key_head * key_step * like.itemsize, like), (length, dim))
        for s in range(length):
            score = f32(0)
            for d in range(dim):
                score += query[d] * as_float(own_keys[s, d])
            scores[s] = score * scaling + _bias(at_mask, is_bool, s, length, like)
        _softmax(scores, carray(pointer(sinks, FLOATS), heads)[head] if sinks else f32(-np.inf))
        own_values = carray(
            pointer(values + key_head * value_step * like.itemsize, like), (length, value_dim)
        )
        own = result[head * value_dim : (head + 1) * value_dim]
        for s in range(length):
            for d in range(value_dim):
                own[d] += scores[s] * as_float(own_values[s, d])
    return result


@kernel(
    [f"void({SIZES}, float32, int64, int64, {CACHE}, {MASK}, int64, {like})" for like in LIKE],
    nogil=True,
)
def attend(sizes, scaling, sinks, q, cache, mask, out, like):
    """Write out [N, V]: the attention of heads q [N, D], computed by `attended`."""
    heads, _, dim, _ = sizes
    write(attended(read(q, heads * dim, like), sizes, scaling, sinks, cache, mask, like), out, like)

"""Attention block of one token, or of a few of one sequence, in one call, compiled by numba.
Importing this module imports numba.

The block is a norm, queries, keys and values, attention over the cache, the output layer, the sum
with the block's input, and the norm of that sum. Values are rounded wherever modules round them:
the bits are those of the parts called one by one.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel, part
from runtime.kernels.cpu.decoder.attention import (
    CACHE,
    MASK,
    NORM,
    ORDER,
    SIZES,
    TURN,
    attended,
    place,
    prepare,
)
from runtime.kernels.cpu.decoder.norms import FLOATS, read, round_all, scale_to_unit, write
from runtime.kernels.cpu.gated import LIKE, pointer, rounded
from runtime.kernels.cpu.linear import LINEAR, linear

f32 = np.float32
_LAYERS = f"UniTuple({LINEAR}, 4)"  # of queries, keys, values and output
_NORMS = f"UniTuple({NORM}, 4)"  # of the input, of queries, of keys, and of the sum
_CONSTANT = f"int64, {SIZES}, {_LAYERS}, {_NORMS}, {ORDER}, float32, int64"
_GIVEN = f"int64, int64, {TURN}, {CACHE}, {MASK}, int64, int64"


@part
def _normalised(values, norm, like):
    span, weights, eps, is_rounded = norm
    out = values.copy()
    for t in range(len(out)):
        scale_to_unit(out[t], carray(pointer(weights, FLOATS), span), f32(eps), is_rounded, like)
    return out


@part
def _rounded(values, like):
    round_all(values.ravel(), like)
    return values


@part
def _at(turn, t, like):
    """Return the angles of token t."""
    is_float32, half, angles, cos, sin = turn
    behind = t * angles * (FLOATS.itemsize if is_float32 else like.itemsize)
    return is_float32, half, angles, cos + behind, sin + behind


@kernel([f"void({_CONSTANT}, {_GIVEN}, {like})" for like in LIKE], nogil=True)
def attend_block(
    hidden,
    sizes,
    layers,
    norms,
    order,
    scaling,
    sinks,
    count,
    x,
    turn,
    cache,
    mask,
    out,
    normalised,
    like,
):
    """Write the sum of x [T, H] and its attention to `out`, the norm of that sum to `normalised`,
    and the tokens' keys and values to the last positions of the cache.

    There are `count` tokens; each attends to the positions up to its own, as if it were alone. The
    mask [T, S] is absent if its address is 0."""
    heads, groups, dim, value_dim = sizes
    keys, key_step, values, value_step, length = cache
    at_mask, is_bool = mask
    num_keys = heads // groups
    came = read(x, count * hidden, like).reshape((count, hidden))
    tokens = _normalised(came, norms[0], like)
    query = _rounded(linear(layers[0], tokens, heads * dim, like), like)
    key = _rounded(linear(layers[1], tokens, num_keys * dim, like), like)
    value = linear(layers[2], tokens, num_keys * value_dim, like)
    attention = np.empty((count, heads * value_dim), np.float32)
    for t in range(count):
        seen = length - count + t + 1
        own = _at(turn, t, like)
        prepare(query[t], dim, norms[1], order, own, like)
        prepare(key[t], dim, norms[2], order, own, like)
        place(key[t], dim, keys + (seen - 1) * dim * like.itemsize, key_step, like)
        place(
            value[t], value_dim, values + (seen - 1) * value_dim * like.itemsize, value_step, like
        )
        row = at_mask + t * length * (1 if is_bool else like.itemsize) if at_mask else 0
        own_cache = keys, key_step, values, value_step, seen
        own_mask = row, is_bool
        attention[t] = attended(query[t], sizes, scaling, sinks, own_cache, own_mask, like)
    added = _rounded(linear(layers[3], _rounded(attention, like), hidden, like), like)
    for t in range(count):
        for h in range(hidden):
            added[t, h] = rounded(came[t, h] + added[t, h], like)
    write(added.ravel(), out, like)
    write(_normalised(added, norms[3], like).ravel(), normalised, like)

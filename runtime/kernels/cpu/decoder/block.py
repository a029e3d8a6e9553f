"""Attention block of one token in one call, compiled by numba. Importing this module imports numba.

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


@part
def _normalised(values, norm, like):
    span, weights, eps, is_rounded = norm
    out = values.copy()
    scale_to_unit(out, carray(pointer(weights, FLOATS), span), f32(eps), is_rounded, like)
    return out


@kernel(
    [f"void({_CONSTANT}, int64, {TURN}, {CACHE}, {MASK}, int64, int64, {like})" for like in LIKE],
    nogil=True,
)
def attend_block(
    hidden, sizes, layers, norms, order, scaling, sinks, x, turn, cache, mask, out, normalised, like
):
    """Write the sum of x [H] and its attention to `out`, the norm of that sum to `normalised`, and
    the token's key and value to the last position of the cache."""
    heads, groups, dim, value_dim = sizes
    keys, key_step, values, value_step, length = cache
    num_keys = heads // groups
    came = read(x, hidden, like)
    token = _normalised(came, norms[0], like)
    query = round_all(linear(layers[0], token, heads * dim, like), like)
    key = round_all(linear(layers[1], token, num_keys * dim, like), like)
    value = linear(layers[2], token, num_keys * value_dim, like)
    prepare(query, dim, norms[1], order, turn, like)
    prepare(key, dim, norms[2], order, turn, like)
    place(key, dim, keys + (length - 1) * dim * like.itemsize, key_step, like)
    place(value, value_dim, values + (length - 1) * value_dim * like.itemsize, value_step, like)
    attention = round_all(attended(query, sizes, scaling, sinks, cache, mask, like), like)
    added = round_all(linear(layers[3], attention, hidden, like), like)
    for h in range(hidden):
        added[h] = rounded(came[h] + added[h], like)
    write(added, out, like)
    write(_normalised(added, norms[3], like), normalised, like)

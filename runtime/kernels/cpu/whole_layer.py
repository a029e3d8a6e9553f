"""Experts of one token, or of a few, in one call, for experts that are never evicted, compiled by
numba. Importing this module imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.decoder.norms import FLOATS, INTEGERS, read, write
from runtime.kernels.cpu.gated import (
    LIKE,
    add_expert,
    as_factors,
    new_factors,
    part,
    pointer,
    rounded,
    swiglu,
)
from runtime.kernels.cpu.linear import PLAIN, add_blocks
from runtime.kernels.cpu.replicas.gated_trellis import (
    FUNCTIONS,
    MATRICES,
    ROTATIONS,
    add_replica,
    all_rotated,
)

f32 = np.float32
REPLICAS = f"Tuple(({FUNCTIONS}, {{}}, {ROTATIONS}))"
"""Type of the replicas of experts that have no address, in the layout of `gated_trellis`; empty if
there are none."""
LEFT_OUT = -1
"""Address of an expert that is left out: the token's other experts share its weight."""

_SIZES = "UniTuple(int64, 3)"  # hidden, neurons, top-k
# kinds of gate, up and down, and where they begin in an expert
_MATRICES = "UniTuple(UniTuple(int64, 2), 3)"


def no_replicas(num_layers: int) -> tuple:
    """Return the `replicas` argument of kernels for L layers that have no replicas."""
    floats = np.empty(0, np.float32)
    matrix = np.empty((0, 0), np.float32)
    numbers = np.empty(0, np.int64)
    tables = (np.empty((num_layers, 0, 2, count), np.int64) for count in (4, 5))
    return numbers, *tables, (floats, floats, matrix, matrix, matrix, 1)


@part
def _by_expert(ids):
    """Return the places of ids by ascending expert, the order in which modules add experts up."""
    order = np.arange(len(ids))
    for i in range(1, len(ids)):
        rank = order[i]
        place = i
        while place and ids[order[place - 1]] > ids[rank]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = rank
    return order


@part
def _add_in_blocks(start, matrices, x, inner, acts, out, like):
    """Add an expert of ggml's blocks on x [T, H] to `out` [T, H]; `inner` [2, T, I] and `acts`
    [T, I] are overwritten."""
    gate, up, down = matrices
    inner[:] = 0
    add_blocks(gate[0], start + gate[1], x, inner[0], like)
    add_blocks(up[0], start + up[1], x, inner[1], like)
    for t in range(len(acts)):
        for n in range(acts.shape[1]):
            acts[t, n] = swiglu(inner[0, t, n], inner[1, t, n], like)
    add_blocks(down[0], start + down[1], acts, out, like)


@part
def _numbers(x, rotations, are_needed):
    """Return tokens as `add_replica` takes them, if there are replicas among their experts,
    otherwise empty arrays."""
    if not are_needed:
        return np.empty((len(x), rotations[5], 0), np.int16), np.empty(len(x), np.float32)
    return all_rotated(x, rotations[0], rotations[2], rotations[5])


@part
def _rows(values, which):
    """Return the rows of an array with these indices."""
    out = np.empty((len(which), *values.shape[1:]), values.dtype)
    for i in range(len(which)):
        out[i] = values[which[i]]
    return out


@part
def _share_out(factors, selected, starts, top_k):
    """Take the weights [T * K] of experts that are left out, and scale the others of each token, so
    that it keeps its sum."""
    for first in range(0, len(factors), top_k):
        total = f32(0)
        kept = f32(0)
        for i in range(first, first + top_k):
            total += factors[i]
            if starts[selected[i]] != LEFT_OUT:
                kept += factors[i]
        for i in range(first, first + top_k):
            is_kept = starts[selected[i]] != LEFT_OUT
            factors[i] = factors[i] * total / kept if is_kept and kept > 0 else f32(0)


# number of tokens, addresses of x, ids and weights, has_wide_weights, address of out
_TOKEN = "int64, int64, int64, int64, boolean, int64"


_LAYER = f"int64[::1], {_MATRICES}, {_SIZES}, {REPLICAS.format(MATRICES)}"


@kernel([f"boolean({_LAYER}, {_TOKEN}, {like})" for like in LIKE], nogil=True)
def compute_layer(
    starts, matrices, sizes, replicas, count, x, ids, weights, has_wide_weights, out, like
):
    """Write to `out` [T, H] the sum of each token's experts ids [T, K] on x [T, H] by their weights
    [T, K], float32 if they are wide. There are `count` tokens; none changes the bits of another.

    Expert e begins at starts[e]. Its matrices are all plain, with up behind gate, or none is plain.
    If starts[e] is 0, its replica is used; if it is `LEFT_OUT`, none. Return False if an expert has
    no replica either, or is none of the E."""
    hidden, num_neurons, top_k = sizes
    functions, addresses, coded_sizes, rotations = replicas
    selected = carray(pointer(ids, INTEGERS), count * top_k)
    has_replicas = len(addresses) > 0
    are_needed = False
    are_left_out = False
    for expert in selected:
        if not 0 <= expert < len(starts) or not (starts[expert] or has_replicas):
            return False
        are_needed |= starts[expert] == 0
        are_left_out |= starts[expert] == LEFT_OUT
    num_weights = count * top_k
    factors = (
        read(weights, num_weights, FLOATS) if has_wide_weights else read(weights, num_weights, like)
    )
    if are_left_out:
        _share_out(factors, selected, starts, top_k)
    values = read(x, count * hidden, like)
    tokens = as_factors(values, like).reshape((count, hidden))
    values = values.reshape((count, hidden))
    gate = matrices[0]
    down = matrices[2]
    order = _by_expert(selected)
    numbers = _numbers(values, rotations, are_needed)
    total = np.zeros((count, hidden), np.float32)
    last = 0
    while last < len(order):
        first = last
        expert = selected[order[first]]
        while last < len(order) and selected[order[last]] == expert:
            last += 1
        if starts[expert] == LEFT_OUT:
            continue
        ranks = order[first:last]
        which = ranks // top_k
        own = np.zeros((len(which), hidden), np.float32)
        start = starts[expert]
        if start == 0:
            given = _rows(numbers[0], which), _rows(numbers[1], which)
            add_replica(
                functions, addresses[expert], coded_sizes[expert], rotations, given, own, like
            )
        elif gate[0] == PLAIN:
            acts = new_factors(len(which) * num_neurons, like).reshape((len(which), num_neurons))
            own_tokens = tokens if count == len(which) == 1 else _rows(tokens, which)
            add_expert(start + gate[1], start + down[1], own_tokens, acts, own, like)
        else:
            inner = np.empty((2, len(which), num_neurons), np.float32)
            exact = np.empty((len(which), num_neurons), np.float32)
            _add_in_blocks(start, matrices, _rows(values, which), inner, exact, own, like)
        for i in range(len(which)):
            for h in range(hidden):
                share = rounded(rounded(own[i, h], like) * factors[ranks[i]], like)
                total[which[i], h] = rounded(total[which[i], h] + share, like)
    write(total.ravel(), out, like)
    return True

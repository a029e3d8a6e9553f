"""Experts of one token in one call, for experts that are never evicted, compiled by numba.
Importing this module imports numba."""

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
    rotated_numbers,
)

f32 = np.float32
REPLICAS = f"Tuple(({FUNCTIONS}, {{}}, {ROTATIONS}))"
"""Type of the replicas of experts that have no address, in the layout of `gated_trellis`; empty if
there are none."""

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
    """Return the ranks by ascending expert, the order in which modules add experts up."""
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
    """Add an expert of ggml's blocks on x [H] to `out` [H]; `inner` [2 I] and `acts` [I] are
    overwritten."""
    gate, up, down = matrices
    num_neurons = len(acts)
    inner[:] = 0
    add_blocks(gate[0], start + gate[1], x, inner[:num_neurons], like)
    add_blocks(up[0], start + up[1], x, inner[num_neurons:], like)
    for n in range(num_neurons):
        acts[n] = swiglu(inner[n], inner[num_neurons + n], like)
    add_blocks(down[0], start + down[1], acts, out, like)


@part
def _numbers(x, rotations, are_needed):
    """Return a token as `add_replica` takes it, if there are replicas among its experts, otherwise
    empty arrays."""
    if not are_needed:
        return np.empty((rotations[5], 0), np.int16), np.empty(1, np.float32)
    return rotated_numbers(x, rotations[0], rotations[2], rotations[5])


# addresses of x, ids and weights, has_wide_weights, address of out
_TOKEN = "int64, int64, int64, boolean, int64"


_LAYER = f"int64[::1], {_MATRICES}, {_SIZES}, {REPLICAS.format(MATRICES)}"


@kernel([f"boolean({_LAYER}, {_TOKEN}, {like})" for like in LIKE], nogil=True)
def compute_layer(starts, matrices, sizes, replicas, x, ids, weights, has_wide_weights, out, like):
    """Write to `out` [H] the sum of a token's experts ids [K] on x [H] by their weights [K],
    float32 if they are wide.

    Expert e begins at starts[e]. Its matrices are all plain, with up behind gate, or none is plain.
    If starts[e] is 0, its replica is used. Return False if an expert has no replica either, or is
    none of the E."""
    hidden, num_neurons, top_k = sizes
    functions, addresses, coded_sizes, rotations = replicas
    selected = carray(pointer(ids, INTEGERS), top_k)
    has_replicas = len(addresses) > 0
    are_needed = False
    for expert in selected:
        if not 0 <= expert < len(starts) or not (starts[expert] or has_replicas):
            return False
        are_needed |= starts[expert] == 0
    factors = read(weights, top_k, FLOATS) if has_wide_weights else read(weights, top_k, like)
    values = read(x, hidden, like)
    gate = matrices[0]
    down = matrices[2]
    token = as_factors(values, like)
    acts = new_factors(num_neurons, like)
    order = _by_expert(selected)
    inner = np.empty(2 * num_neurons, np.float32)
    exact_acts = np.empty(num_neurons, np.float32)
    numbers = _numbers(values, rotations, are_needed)
    total = np.zeros(hidden, np.float32)
    own = np.empty(hidden, np.float32)
    for rank in order:
        own[:] = 0
        expert = selected[rank]
        start = starts[expert]
        if start == 0:
            add_replica(
                functions, addresses[expert], coded_sizes[expert], rotations, numbers, own, like
            )
        elif gate[0] == PLAIN:
            add_expert(start + gate[1], start + down[1], token, acts, own, like)
        else:
            _add_in_blocks(start, matrices, values, inner, exact_acts, own, like)
        for h in range(hidden):
            total[h] = rounded(
                total[h] + rounded(rounded(own[h], like) * factors[rank], like), like
            )
    write(total, out, like)
    return True

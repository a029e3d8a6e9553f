"""One token's experts, which never leave, in one call, compiled by numba. Importing this module imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import LIKE, add_expert, as_factors, new_factors, part, pointer, rounded, swiglu
from runtime.kernels.cpu.linear import PLAIN, add_blocks
from runtime.kernels.cpu.norms import FLOATS, INTEGERS, read, write

f32 = np.float32
_SIZES = "UniTuple(int64, 3)"  # hidden, neurons, top-k
_MATRICES = "UniTuple(UniTuple(int64, 2), 3)"  # kinds of gate, up and down, and where they begin in an expert


@part
def _by_expert(ids):
    """The ranks by ascending expert, the order in which modules add experts up."""
    order = np.arange(len(ids))
    for i in range(1, len(ids)):
        rank, place = order[i], i
        while place and ids[order[place - 1]] > ids[rank]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = rank
    return order


@part
def _add_in_blocks(start, matrices, x, inner, acts, out, like):
    """Add an expert of ggml's blocks on x [H] to `out` [H]; `inner` [2 I] and `acts` [I] are overwritten."""
    gate, up, down = matrices
    num_neurons, inner[:] = len(acts), 0
    add_blocks(gate[0], start + gate[1], x, inner[:num_neurons], like)
    add_blocks(up[0], start + up[1], x, inner[num_neurons:], like)
    for n in range(num_neurons):
        acts[n] = swiglu(inner[n], inner[num_neurons + n], like)
    add_blocks(down[0], start + down[1], acts, out, like)


_TOKEN = "int64, int64, int64, boolean, int64"  # addresses of x, ids and weights, has_wide_weights, address of out


@kernel([f"boolean(int64[::1], {_MATRICES}, {_SIZES}, {_TOKEN}, {like})" for like in LIKE], nogil=True)
def compute_layer(starts, matrices, sizes, x, ids, weights, has_wide_weights, out, like):
    """Write to `out` [H] the sum of a token's experts ids [K] on x [H] by their weights [K], float32 if they are wide.
    Expert e begins at starts[e], its matrices all plain, with up behind gate, or none. Returns False if that is 0 for
    one of them, or one is none of the E."""
    hidden, num_neurons, top_k = sizes
    selected = carray(pointer(ids, INTEGERS), top_k)
    for expert in selected:
        if not 0 <= expert < len(starts) or not starts[expert]:
            return False
    factors = read(weights, top_k, FLOATS) if has_wide_weights else read(weights, top_k, like)
    values, gate, down = read(x, hidden, like), matrices[0], matrices[2]
    token, acts, order = as_factors(values, like), new_factors(num_neurons, like), _by_expert(selected)
    inner, exact_acts = np.empty(2 * num_neurons, np.float32), np.empty(num_neurons, np.float32)
    total, own = np.zeros(hidden, np.float32), np.empty(hidden, np.float32)
    for rank in order:
        own[:] = 0
        start = starts[selected[rank]]
        if gate[0] == PLAIN:
            add_expert(start + gate[1], start + down[1], token, acts, own, like)
        else:
            _add_in_blocks(start, matrices, values, inner, exact_acts, own, like)
        for h in range(hidden):
            total[h] = rounded(total[h] + rounded(rounded(own[h], like) * factors[rank], like), like)
    write(total, out, like)
    return True

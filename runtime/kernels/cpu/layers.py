"""Layers of a decoder, one after another, for one token in one call, compiled by numba: blocks, routers and experts.
Importing this module imports numba.

Shapes: L layers, E experts, K top-k, H hidden.
"""

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.attention import ORDER, SIZES, TURN
from runtime.kernels.cpu.block import attend_block
from runtime.kernels.cpu.gated import LIKE, part, rounded
from runtime.kernels.cpu.norms import FLOATS, read, write
from runtime.kernels.cpu.routing import HOW, route
from runtime.kernels.cpu.whole_layer import compute_layer

_OPERANDS = "int64[:, :, ::1], int64[:, :, ::1], float64[:, ::1], int64[:, ::1]"
_EXPERTS = "int64[:, ::1], int64[:, :, ::1], int64"  # starts [L, E], matrices [L, 3, 2], neurons
_PLACES = "UniTuple(int64, 6)"  # addresses of x, its norm, what experts give, logits, weights and ids
_LAYERS = f"{_OPERANDS}, int64, {SIZES}, {ORDER}, {HOW}, {_EXPERTS}, int64, boolean, {_PLACES}, {TURN}, int64[:, ::1]"


@part
def _linear(own):
    return own[0], own[1], own[2]


@part
def _linears(own):
    return _linear(own[0]), _linear(own[1]), _linear(own[2]), _linear(own[3])


@part
def _norm(own, eps):
    return own[0], own[1], eps, own[2] != 0


@part
def _norms(own, eps):
    return _norm(own[0], eps[0]), _norm(own[1], eps[1]), _norm(own[2], eps[2]), _norm(own[3], eps[3])


@part
def _cache(own):
    return own[0], own[1], own[2], own[3], own[4]


@part
def _matrices(own):
    return (own[0, 0], own[0, 1]), (own[1, 0], own[1, 1]), (own[2, 0], own[2, 1])


@part
def _add(x, other, count, like):
    """Add the numbers at an address to those at x."""
    sums, others = read(x, count, like), read(other, count, like)
    for i in range(count):
        sums[i] = rounded(sums[i] + others[i], like)
    write(sums, x, like)


@kernel([f"UniTuple(int64, 2)({_LAYERS}, {like})" for like in LIKE], nogil=True)
def compute_layers(
    linears,
    norms,
    floats,
    more,
    hidden,
    sizes,
    order,
    how,
    top_k,
    tolerance,
    starts,
    matrices,
    num_neurons,
    first,
    is_routed,
    places,
    turn,
    caches,
    like,
):
    """Compute x [H] in place by the layers from number `first` on; that one may be done up to its router (`is_routed`).
    Return how many layers there are, or the number of the first that could not be done: with 0, its choice is not
    clear; with 1, an expert is absent. Of that layer all is done but its experts.

    By layer there are the operands of linear layers [4, 3] and norms [4, 3], whose `floats` [5] are four epsilons and
    the scaling; `more` [3], the addresses of sinks and of the router's matrix and bias; and of the cache. Weights and
    ids are written by layer, [L, K]."""
    x, normalised, given, logits, weights, ids = places
    num_experts, weight_nbytes = starts.shape[1], FLOATS.itemsize if how[2] else like.itemsize
    for layer in range(first, len(starts)):
        own_weights, own_ids = weights + layer * top_k * weight_nbytes, ids + layer * top_k * 8
        if layer > first or not is_routed:
            floats_of, (sinks, matrix, bias) = floats[layer], _linear(more[layer])
            attend_block(
                hidden,
                sizes,
                _linears(linears[layer]),
                _norms(norms[layer], floats_of),
                order,
                floats_of[4],
                sinks,
                x,
                turn,
                _cache(caches[layer]),
                (0, 0),
                x,
                normalised,
                like,
            )
            router = matrix, bias, hidden, num_experts
            if not route(router, how, top_k, tolerance, normalised, logits, own_weights, own_ids, like):
                return layer, 0
        if not compute_layer(
            starts[layer],
            _matrices(matrices[layer]),
            (hidden, num_neurons, top_k),
            normalised,
            own_ids,
            own_weights,
            how[2],
            given,
            like,
        ):
            return layer, 1
        _add(x, given, hidden, like)
    return len(starts), 0

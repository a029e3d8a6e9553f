"""Layers of a decoder, one after another, for one token or a few of one sequence in one call,
compiled by numba: blocks, routers and experts. Importing this module imports numba.

Shapes: L layers, T tokens, E experts, K top-k, H hidden.
"""

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.decoder.attention import ORDER, SIZES, TURN
from runtime.kernels.cpu.decoder.block import attend_block
from runtime.kernels.cpu.decoder.norms import FLOATS, INTEGERS, read, write
from runtime.kernels.cpu.decoder.routing import route
from runtime.kernels.cpu.gated import LIKE, part, rounded
from runtime.kernels.cpu.whole_layer import REPLICAS, compute_layer

_OPERANDS = "Tuple((int64[:, :, ::1], int64[:, :, ::1], float64[:, ::1], int64[:, ::1]))"
_SHAPES = f"Tuple((int64, {SIZES}, {ORDER}))"
_HOW = "Tuple((UniTuple(boolean, 3), int64, float64))"  # as `routing` has it
_CODED = "int64[:, :, :, ::1], int64[:, :, :, ::1]"  # addresses [L, E, 2, 4], sizes [L, E, 2, 5]
_EXPERTS = f"Tuple((int64[:, ::1], int64[:, :, ::1], int64, {REPLICAS.format(_CODED)}))"
"""Starts [L, E], matrices [L, 3, 2], neurons, and replicas as `whole_layer` has them."""

_BEGIN = "Tuple((int64, boolean, int64))"
# addresses of x, its norm, what experts give, logits, weights and ids
_PLACES = "UniTuple(int64, 6)"
_LAYERS = f"{_OPERANDS}, {_SHAPES}, {_HOW}, {_EXPERTS}, {_BEGIN}, {_PLACES}, {TURN}, int64[:, ::1]"


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
    return (
        _norm(own[0], eps[0]),
        _norm(own[1], eps[1]),
        _norm(own[2], eps[2]),
        _norm(own[3], eps[3]),
    )


@part
def _cache(own):
    return own[0], own[1], own[2], own[3], own[4]


@part
def _matrices(own):
    return (own[0, 0], own[0, 1]), (own[1, 0], own[1, 1]), (own[2, 0], own[2, 1])


@part
def _attend(layer, operands, shapes, count, x, normalised, turn, caches, like):
    linears, norms, floats, more = operands
    hidden, sizes, order = shapes
    own = _linears(linears[layer]), _norms(norms[layer], floats[layer])
    sinks = more[layer, 0]
    cache = _cache(caches[layer])
    scaling = floats[layer, 4]
    tokens = count, x, turn, cache, (0, 0), x, normalised
    attend_block(hidden, sizes, *own, order, scaling, sinks, *tokens, like)


@part
def _choose(layer, operands, how, router, count, normalised, logits, chosen, like):
    """Choose the experts of each token by `route`, and return whether all choices are clear.
    `router` has the numbers of inputs and experts, `chosen` the addresses of weights and ids."""
    matrix = operands[3][layer, 1], operands[3][layer, 2], *router
    weights, ids = chosen
    top_k = how[1]
    weight_nbytes = FLOATS.itemsize if how[0][2] else like.itemsize
    for t in range(count):
        token = normalised + t * router[0] * like.itemsize
        own = weights + t * top_k * weight_nbytes, ids + t * top_k * INTEGERS.itemsize
        if not route(matrix, *how, token, logits, *own, like):
            return False
    return True


@part
def _compute(layer, experts, sizes, count, normalised, chosen, are_wide, given, like):
    starts, matrices, _, (functions, addresses, coded_sizes, rotations) = experts
    weights, ids = chosen
    own = _matrices(matrices[layer])
    replicas = functions, addresses[layer], coded_sizes[layer], rotations
    tokens = count, normalised, ids, weights, are_wide, given
    return compute_layer(starts[layer], own, sizes, replicas, *tokens, like)


@part
def _add(x, other, count, like):
    """Add the numbers at an address to those at x."""
    sums = read(x, count, like)
    others = read(other, count, like)
    for i in range(count):
        sums[i] = rounded(sums[i] + others[i], like)
    write(sums, x, like)


@kernel([f"UniTuple(int64, 2)({_LAYERS}, {like})" for like in LIKE], nogil=True)
def compute_layers(operands, shapes, how, experts, begin, places, turn, caches, like):
    """Compute x [T, H] in place by layers from the first on, and return where and why it stopped.

    `begin` has the number of the first layer, whether it is already done up to its router, and T.
    The result is the number of layers and 0 if all are done. Otherwise it is the number of the
    first layer that could not be done, and 0 if a choice is not clear or 1 if an expert is absent.
    All of that layer is done but its experts, where a choice is not clear also but its choices.

    `operands` are by layer: linear layers [4, 3] and norms [4, 3], four epsilons and the scaling
    [5], the addresses of sinks and of the router's matrix and bias [3]. `caches` are by layer, too.
    Weights and ids are written by layer, [L, T, K]."""
    first, is_routed, count = begin
    x, normalised, given, logits, weights, ids = places
    hidden = shapes[0]
    top_k = how[1]
    are_wide = how[0][2]
    num_layers, num_experts = experts[0].shape
    weight_nbytes = FLOATS.itemsize if are_wide else like.itemsize
    for layer in range(first, num_layers):
        before = layer * count * top_k
        chosen = weights + before * weight_nbytes, ids + before * INTEGERS.itemsize
        if layer > first or not is_routed:
            _attend(layer, operands, shapes, count, x, normalised, turn, caches, like)
            router = hidden, num_experts
            if not _choose(layer, operands, how, router, count, normalised, logits, chosen, like):
                return layer, 0
        sizes = hidden, experts[2], top_k
        if not _compute(layer, experts, sizes, count, normalised, chosen, are_wide, given, like):
            return layer, 1
        _add(x, given, count * hidden, like)
    return num_layers, 0

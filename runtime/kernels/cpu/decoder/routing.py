"""One token's choice of experts by a router that is a matrix, compiled by numba. Importing this
module imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.decoder.norms import FLOATS, INTEGERS, read, round_all, write
from runtime.kernels.cpu.gated import LIKE, part, pointer, products, rounded

f32 = np.float32
# least logit, relative to the largest: the exponential of a smaller one may be zero
_LEAST = f32(-80)
_REST = f32(1 / 16)


@part
def _largest(sums, order):
    """Write to `order` the indices of the largest sums, the largest first; of equal sums the first
    one comes first."""
    left = sums.copy()
    for rank in range(len(order)):
        best = 0
        for e in range(1, len(left)):
            if left[e] > left[best]:
                best = e
        order[rank] = best
        left[best] = f32(-np.inf)


@part
def _is_clear(sums, order, tolerance, like):
    """Return whether neither another order of additions nor rounding can change which experts are
    selected. The last of `order` is the first expert that is not selected."""
    last = sums[order[-2]]
    following = sums[order[-1]]
    most = f32(0)
    for e in range(len(sums)):
        most = max(most, abs(sums[e]))
    near = tolerance * (max(abs(last), abs(following)) + _REST * most) / f32(2)
    is_apart = rounded(last - near, like) > rounded(following + near, like)
    return is_apart and following - sums[order[0]] > _LEAST


# addresses of matrix and bias (0: none), number of inputs and of experts
_ROUTER = "UniTuple(int64, 4)"
# is_shared_out, has_wide_logits, has_wide_weights; top-k; tolerance
_HOW = "UniTuple(boolean, 3), int64, float32"


@kernel(
    [f"boolean({_ROUTER}, {_HOW}, int64, int64, int64, int64, {like})" for like in LIKE], nogil=True
)
def route(router, how, top_k, tolerance, x, logits, weights, ids, like):
    """Write the logits [E], the indices of the K largest and their weights, and return whether the
    choice is clear.

    The weights are values of the softmax, divided by their sum if `is_shared_out`. Wide numbers are
    float32. If the choice is not clear, the numbers written are to be dropped.
    """
    matrix, bias, inputs, num_experts = router
    is_shared_out, has_wide_logits, has_wide_weights = how
    token = read(x, inputs, like).reshape((1, inputs))
    sums = products(matrix, bias, token, num_experts, like)[0]
    order = np.empty(top_k + 1, np.int64)
    _largest(sums, order)
    if not _is_clear(sums, order, tolerance, like):
        return False
    round_all(sums, like)
    if has_wide_logits:
        write(sums, logits, FLOATS)
    else:
        write(sums, logits, like)
    chosen = np.empty(top_k, np.float32)
    total = f32(0)
    most = sums[order[0]]
    selected = carray(pointer(ids, INTEGERS), top_k)
    for rank in range(top_k):
        selected[rank] = order[rank]
        chosen[rank] = np.exp(sums[order[rank]] - most)
    for e in range(num_experts):
        total += np.exp(sums[e] - most)
    if is_shared_out:
        total = chosen.sum()
    for rank in range(top_k):
        chosen[rank] /= total
    if has_wide_weights:
        write(chosen, weights, FLOATS)
    else:
        write(chosen, weights, like)
    return True

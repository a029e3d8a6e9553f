"""Gated experts on one token, whose rows threads may share: each multiplies some rows of gate and
up, all meet, each activates some neurons, all meet, and each multiplies some rows of down.
Importing this module imports numba.

The kernel of a matrix has the signature `published.MATRIX` and is called by its address, so that
one function shares the experts of every format. A sum is of one row, by one thread, and experts
are added up in their order: the bits do not depend on the number of threads.
"""

from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import (
    activate,
    activate_clamped,
    add_bias,
    part,
    pointer,
    products,
)
from runtime.kernels.cpu.published import (
    CODES,
    FLOAT_LIKE,
    INT16_LIKE,
    INT64_LIKE,
    KIND,
    MATRIX,
    NUM_FIELDS,
    PLAIN_BFLOAT16,
    PLAIN_FLOAT16,
    UINT16_LIKE,
)
from runtime.kernels.cpu.team import call, meet

# A job is int64 [JOB]: addresses, sizes, and offsets in an expert (-1: no bias).
(
    TABLE,  # int64 [shares, NUM_INNER + NUM_DOWN, RANGE], what each share multiplies
    NUM_INNER,  # matrices of gate and up
    NUM_DOWN,
    NUM_EXPERTS,
    STARTS,  # int64 [n], where experts begin
    ROWS,  # int64 [n], the row of y of each
    X,  # float32 [H]
    HIDDEN,
    INNER,  # float32 [n, 2 I]
    ACTS,  # float32 [n, I]
    NEURONS,
    Y,  # float32 [K, H]
    DTYPE,  # PLAIN_BFLOAT16, PLAIN_FLOAT16 or PLAIN_FLOAT32, in which the model computes
    INNER_BIAS,
    DOWN_BIAS,
    CONSTANTS,  # float32 [2], alpha and limit of the clamped gate, which has biases
    JOB,
) = range(17)
# A range of rows is int64 [RANGE]: the kernel's address, the rows in the product of its part,
# whether x may be taken for less than float32, and the fields of these rows as a matrix.
FUNCTION, FIRST, LAST, IS_NARROW, FIELDS = range(5)
RANGE = FIELDS + NUM_FIELDS


@kernel(f"void({MATRIX})", nogil=True)
def multiply_plain(fields, start, x, y, is_narrow):
    """Add x [I], which was rounded, times a matrix of plain numbers to y [O]."""
    address = start + fields[CODES]
    if fields[KIND] == PLAIN_BFLOAT16:
        own = products(address, 0, x, len(y), UINT16_LIKE)
    elif fields[KIND] == PLAIN_FLOAT16:
        own = products(address, 0, x, len(y), INT16_LIKE)
    else:
        own = products(address, 0, x, len(y), FLOAT_LIKE)
    for row in range(len(y)):
        y[row] += own[row]


@part
def _multiply(own, start, x, y):
    """Add a range of rows times x to its place in y."""
    fields = carray(pointer(own.ctypes.data + 8 * FIELDS, INT64_LIKE), NUM_FIELDS)
    call(own[FUNCTION], (fields, start, x, y[own[FIRST] : own[LAST]], own[IS_NARROW] != 0))


@part
def _activate(job, start, inner, acts, first, last, like):
    """Write the activations of some neurons."""
    own_acts = acts[first:last]
    own = carray(pointer(job[X], like), 1)  # a global array would be read-only
    if job[INNER_BIAS] < 0:
        activate(inner[first:last], inner[len(acts) + first : len(acts) + last], own_acts, own)
    else:
        constants = carray(pointer(job[CONSTANTS], FLOAT_LIKE), 2)
        bias = start + job[INNER_BIAS] + 2 * first * like.itemsize
        both = inner[2 * first : 2 * last]
        activate_clamped(both, own_acts, bias, constants[0], constants[1], own)


@part
def _activate_in(job, start, inner, acts, first, last):
    """Do the same in the model's type."""
    if job[DTYPE] == PLAIN_BFLOAT16:
        _activate(job, start, inner, acts, first, last, UINT16_LIKE)
    elif job[DTYPE] == PLAIN_FLOAT16:
        _activate(job, start, inner, acts, first, last, INT16_LIKE)
    else:
        _activate(job, start, inner, acts, first, last, FLOAT_LIKE)


@part
def _add_bias(job, start, own, y, like):
    """Add the bias of a range of rows of down."""
    bias = start + job[DOWN_BIAS] + own[FIRST] * like.itemsize
    add_bias(y[own[FIRST] : own[LAST]], bias, carray(pointer(job[X], like), 1))


@part
def _add_bias_in(job, start, own, y):
    """Do the same in the model's type."""
    if job[DTYPE] == PLAIN_BFLOAT16:
        _add_bias(job, start, own, y, UINT16_LIKE)
    elif job[DTYPE] == PLAIN_FLOAT16:
        _add_bias(job, start, own, y, INT16_LIKE)
    else:
        _add_bias(job, start, own, y, FLOAT_LIKE)


@kernel("void(int64, int64, int64, int64)", nogil=True)
def share_experts(address, share, num_shares, barrier):
    """Do one of `num_shares` shares of the job at this address: add each expert i on x to
    y[rows[i]]. A share alone needs no barrier."""
    job = carray(pointer(address, INT64_LIKE), JOB)
    count = job[NUM_EXPERTS]
    num_neurons = job[NEURONS]
    num_inner = job[NUM_INNER]
    num_ranges = num_inner + job[NUM_DOWN]
    ranges = carray(
        pointer(job[TABLE] + 8 * share * num_ranges * RANGE, INT64_LIKE), (num_ranges, RANGE)
    )
    starts = carray(pointer(job[STARTS], INT64_LIKE), count)
    rows = carray(pointer(job[ROWS], INT64_LIKE), count)
    x = carray(pointer(job[X], FLOAT_LIKE), job[HIDDEN])
    inner = carray(pointer(job[INNER], FLOAT_LIKE), (count, 2 * num_neurons))
    acts = carray(pointer(job[ACTS], FLOAT_LIKE), (count, num_neurons))
    for i in range(count):
        for m in range(num_inner):
            for row in range(ranges[m, FIRST], ranges[m, LAST]):
                inner[i, row] = 0
            _multiply(ranges[m], starts[i], x, inner[i])
    if num_shares > 1:
        meet(barrier, num_shares)
    first = num_neurons * share // num_shares
    last = num_neurons * (share + 1) // num_shares
    for i in range(count):
        _activate_in(job, starts[i], inner[i], acts[i], first, last)
    if num_shares > 1:
        meet(barrier, 2 * num_shares)
    for i in range(count):
        own = carray(pointer(job[Y] + 4 * rows[i] * job[HIDDEN], FLOAT_LIKE), job[HIDDEN])
        for m in range(num_inner, num_ranges):
            _multiply(ranges[m], starts[i], acts[i], own)
            if job[DOWN_BIAS] >= 0:
                _add_bias_in(job, starts[i], ranges[m], own)

"""Gated experts on one token or a few, whose rows threads may share: in three phases they multiply
pieces of gate and up, activate pieces of the neurons, and multiply pieces of down. And single
matrices. Importing this module imports numba.

An expert stands in a job once for each of its tokens, one behind another: a piece of it stays in
the cache meanwhile.

The kernel of a matrix has the signature `published.MATRIX` and is called by its address, so that
one function shares the experts of every format. A sum is of one row, by one thread, and experts
are added up in their order: the bits do not depend on the number of threads.
"""

from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import (
    activate,
    add_bias,
    part,
    pointer,
    products,
)
from runtime.kernels.cpu.published.published import (
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
from runtime.kernels.cpu.team import call, next_piece, piece_is_done, until_all_done

# A job is int64 [JOB]: addresses, sizes, and offsets in an expert (-1: no bias).
(
    TABLE,  # int64 [pieces, NUM_INNER + NUM_DOWN, RANGE], what each piece multiplies
    NUM_PIECES,
    NUM_INNER,  # matrices of gate and up
    NUM_DOWN,
    NUM_EXPERTS,
    STARTS,  # int64 [n], where experts begin
    ROWS,  # int64 [n], the row of y of each
    TOKENS,  # int64 [n], the row of x of each
    NUM_TOKENS,
    X,  # float32 [T, H]
    HIDDEN,
    INNER,  # float32 [n, WIDTH]
    WIDTH,  # outputs of gate and up, 2 I, or of up alone, I
    ACTS,  # float32 [n, I]
    NEURONS,
    Y,  # float32 [K, H]
    DTYPE,  # PLAIN_BFLOAT16, PLAIN_FLOAT16 or PLAIN_FLOAT32, in which the model computes
    INNER_BIAS,
    DOWN_BIAS,
    RULE,  # the number of the gate's rule in `runtime.kernels.gates.RULES`
    TAKES_TURNS,  # whether outputs of gate and up do
    CONSTANTS,  # float32 [2], alpha and limit of the gate
    JOB,
) = range(23)
# A range of rows is int64 [RANGE]: the kernel's address, the rows in the product of its part,
# whether x may be taken for less than float32, and the fields of these rows as a matrix.
FUNCTION, FIRST, LAST, IS_NARROW, FIELDS = range(5)
RANGE = FIELDS + NUM_FIELDS


@kernel(f"void({MATRIX})", nogil=True)
def multiply_plain(fields, start, x, y, is_narrow):
    """Add x [I], which was rounded, times a matrix of plain numbers to y [O]."""
    address = start + fields[CODES]
    token = x.reshape((1, len(x)))
    if fields[KIND] == PLAIN_BFLOAT16:
        own = products(address, 0, token, len(y), UINT16_LIKE)
    elif fields[KIND] == PLAIN_FLOAT16:
        own = products(address, 0, token, len(y), INT16_LIKE)
    else:
        own = products(address, 0, token, len(y), FLOAT_LIKE)
    for row in range(len(y)):
        y[row] += own[0, row]


@part
def _multiply(own, start, x, y):
    """Add a range of rows times x to its place in y."""
    fields = carray(pointer(own.ctypes.data + 8 * FIELDS, INT64_LIKE), NUM_FIELDS)
    call(own[FUNCTION], (fields, start, x, y[own[FIRST] : own[LAST]], own[IS_NARROW] != 0))


@part
def _activate(job, inner, acts, first, last, like):
    """Write the activations of some neurons."""
    own = carray(pointer(job[X], like), 1)  # a global array would be read-only
    stored = carray(pointer(job[CONSTANTS], FLOAT_LIKE), 2)
    constants = (stored[0], stored[1])
    has_up = len(inner) > len(acts)
    if job[TAKES_TURNS]:
        gate = inner[2 * first : 2 * last : 2]
        up = inner[2 * first + 1 : 2 * last : 2]
    else:
        gate = inner[first:last:1]
        up = inner[len(inner) - len(acts) + first : len(inner) - len(acts) + last : 1]
    activate(gate, up, acts[first:last], job[RULE], has_up, constants, own)


@part
def _activate_in(job, inner, acts, first, last):
    """Do the same in the model's type."""
    if job[DTYPE] == PLAIN_BFLOAT16:
        _activate(job, inner, acts, first, last, UINT16_LIKE)
    elif job[DTYPE] == PLAIN_FLOAT16:
        _activate(job, inner, acts, first, last, INT16_LIKE)
    else:
        _activate(job, inner, acts, first, last, FLOAT_LIKE)


@part
def _add_bias(job, bias, own, y, like):
    """Add the bias at this address of a range of rows."""
    bias += own[FIRST] * like.itemsize
    add_bias(y[own[FIRST] : own[LAST]], bias, carray(pointer(job[X], like), 1))


@part
def _add_bias_in(job, bias, own, y):
    """Do the same in the model's type."""
    if job[DTYPE] == PLAIN_BFLOAT16:
        _add_bias(job, bias, own, y, UINT16_LIKE)
    elif job[DTYPE] == PLAIN_FLOAT16:
        _add_bias(job, bias, own, y, INT16_LIKE)
    else:
        _add_bias(job, bias, own, y, FLOAT_LIKE)


@part
def _multiply_inner(job, ranges, x, tokens, starts, inner):
    """Multiply a piece of gate and up of each expert."""
    for i in range(len(starts)):
        for m in range(job[NUM_INNER]):
            for row in range(ranges[m, FIRST], ranges[m, LAST]):
                inner[i, row] = 0
            _multiply(ranges[m], starts[i], x[tokens[i]], inner[i])
            if job[INNER_BIAS] >= 0:
                _add_bias_in(job, starts[i] + job[INNER_BIAS], ranges[m], inner[i])


@part
def _multiply_down(job, ranges, starts, rows, acts):
    """Add a piece of the output of each expert."""
    for i in range(len(starts)):
        y = carray(pointer(job[Y] + 4 * rows[i] * job[HIDDEN], FLOAT_LIKE), job[HIDDEN])
        for m in range(job[NUM_INNER], len(ranges)):
            _multiply(ranges[m], starts[i], acts[i], y)
            if job[DOWN_BIAS] >= 0:
                _add_bias_in(job, starts[i] + job[DOWN_BIAS], ranges[m], y)


@part
def _piece(job, phase, piece):
    """Do a piece of a phase."""
    count = job[NUM_EXPERTS]
    num_neurons = job[NEURONS]
    num_pieces = job[NUM_PIECES]
    starts = carray(pointer(job[STARTS], INT64_LIKE), count)
    rows = carray(pointer(job[ROWS], INT64_LIKE), count)
    inner = carray(pointer(job[INNER], FLOAT_LIKE), (count, job[WIDTH]))
    acts = carray(pointer(job[ACTS], FLOAT_LIKE), (count, num_neurons))
    num_ranges = job[NUM_INNER] + job[NUM_DOWN]
    table = job[TABLE] + 8 * piece * num_ranges * RANGE
    ranges = carray(pointer(table, INT64_LIKE), (num_ranges, RANGE))
    if phase == 0:
        x = carray(pointer(job[X], FLOAT_LIKE), (job[NUM_TOKENS], job[HIDDEN]))
        tokens = carray(pointer(job[TOKENS], INT64_LIKE), count)
        _multiply_inner(job, ranges, x, tokens, starts, inner)
    elif phase == 1:
        first = num_neurons * piece // num_pieces
        last = num_neurons * (piece + 1) // num_pieces
        for i in range(count):
            _activate_in(job, inner[i], acts[i], first, last)
    else:
        _multiply_down(job, ranges, starts, rows, acts)


@kernel("void(int64, int64)", nogil=True)
def add_experts(address, counters):
    """Add each expert i of the job at this address on x[tokens[i]] to y[rows[i]], in pieces that
    the threads of a team take, or this thread alone if `counters` is 0."""
    job = carray(pointer(address, INT64_LIKE), JOB)
    for phase in range(3):
        if counters == 0:
            for piece in range(job[NUM_PIECES]):
                _piece(job, phase, piece)
        else:
            piece = next_piece(counters, phase)
            while piece < job[NUM_PIECES]:
                _piece(job, phase, piece)
                piece_is_done(counters, phase)
                piece = next_piece(counters, phase)
            until_all_done(counters, phase, job[NUM_PIECES])


@part
def _multiply_all(own, x, y):
    """Add a range of rows times each token of x to its place in y."""
    for t in range(len(x)):
        _multiply(own, 0, x[t], y[t])


@kernel("void(int64, int64)", nogil=True)
def multiply_rows(address, counters):
    """Add x [T, H] times a matrix [I, H] to y [T, I], in pieces as `add_experts` does. The job at
    this address has one matrix."""
    job = carray(pointer(address, INT64_LIKE), JOB)
    x = carray(pointer(job[X], FLOAT_LIKE), (job[NUM_TOKENS], job[HIDDEN]))
    y = carray(pointer(job[Y], FLOAT_LIKE), (job[NUM_TOKENS], job[NEURONS]))
    ranges = carray(pointer(job[TABLE], INT64_LIKE), (job[NUM_PIECES], RANGE))
    if counters == 0:
        for own in ranges:
            _multiply_all(own, x, y)
        return
    piece = next_piece(counters, 0)
    while piece < job[NUM_PIECES]:
        _multiply_all(ranges[piece], x, y)
        piece_is_done(counters, 0)
        piece = next_piece(counters, 0)
    until_all_done(counters, 0, job[NUM_PIECES])

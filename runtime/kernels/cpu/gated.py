"""Gated experts on one token, compiled by numba: gate, up, activation and down in one read of the
weights.

Where the module computes in 16 bits, results are rounded as the module rounds them. Products are
summed in float32, in another order than torch's. Weights are read in place, by address; `like` is
an array of their type, uint16 for bfloat16, int16 for float16. Importing this module imports numba.

Shapes: H hidden, I neurons of an expert, n experts or segments, K top-k.
"""

from collections.abc import Callable
from math import erf

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload

from artifacts.common.float16 import float16_as_float, float16_bits
from artifacts.common.numba_loops import inlined_part as part
from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.dots import MOST, dots_of_1, dots_of_2, dots_of_3, dots_of_4
from runtime.kernels.cpu.published.pairs import HAS_DOT, STEP, dot
from runtime.kernels.gates import RULES

f32 = np.float32
u32 = np.uint32
SILU, GELU, GELU_TANH, RELU2, SCALED = range(len(RULES))
BFLOAT16_LIKE = "uint16[::1]"
LIKE = (BFLOAT16_LIKE, "int16[::1]", "float32[::1]")
TOKEN = "float32[::1], int64[::1], float32[:, ::1]"  # x, rows, y


@intrinsic
def pointer(context, address, like):
    """Convert an int64 address to a pointer to elements of `like`."""

    def generate(target, builder, signature, arguments):
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


def _elements_are(element: types.Type) -> Callable[..., bool]:
    """Return a function of `like` that tells whether its elements are of this type, as a constant,
    so that the other branch is not compiled."""

    @intrinsic
    def elements_are(context, like):
        is_so = like.dtype == element

        def generate(_, __, ___, ____):
            return ir.Constant(ir.IntType(1), int(is_so))

        return types.boolean(like), generate

    return elements_are


are_bfloat16 = _elements_are(types.uint16)
_are_float16 = _elements_are(types.int16)


@intrinsic
def as_float(context, element):
    """Convert an element to float32: uint16 holds the bits of a bfloat16, int16 of a float16,
    float32 stays."""

    def generate(_, builder, __, arguments):
        if element == types.float32:
            return arguments[0]
        if element == types.int16:
            return float16_as_float(builder, arguments[0])
        bits = builder.shl(
            builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16)
        )
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(element), generate


@intrinsic
def bits_of(context, value):
    """Return the bits of a float32."""

    def generate(_, builder, __, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _in_float16(context, value):
    """Return the nearest float16 of a float32, as float32."""

    def generate(_, builder, __, arguments):
        return float16_as_float(builder, float16_bits(builder, arguments[0]))

    return types.float32(types.float32), generate


@part
def rounded(value, like):
    """Round float32 to the nearest number of the weights' type, ties to even; NaN stays NaN."""
    if _are_float16(like):
        return _in_float16(value)
    if not are_bfloat16(like) or value != value:
        return value
    bits = bits_of(value)
    return as_float(
        np.uint16(u32(bits + u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1))) >> u32(16))
    )


@intrinsic
def as_stored(context, value, out):
    """Convert float32 to an element of `out`, into which it was rounded."""

    def generate(_, builder, __, arguments):
        if out.dtype == types.float32:
            return arguments[0]
        if out.dtype == types.int16:
            return float16_bits(builder, arguments[0])
        bits = builder.bitcast(arguments[0], ir.IntType(32))
        return builder.trunc(builder.lshr(bits, ir.Constant(ir.IntType(32), 16)), ir.IntType(16))

    return out.dtype(types.float32, out), generate


def new_factors(count, like):
    """Return an array for the factors of weights of this type: bfloat16 for weights in bfloat16 if
    the processor multiplies such pairs, otherwise float32."""


@overload(new_factors, inline="always")
def _typed_factors(count, like):
    dtype = np.uint16 if HAS_DOT and like.dtype == types.uint16 else np.float32
    return lambda count, like: np.empty(count, dtype)


@part
def as_factors(x, like):
    out = new_factors(len(x), like)
    for i in range(len(x)):
        out[i] = as_stored(as_float(x[i]), out)
    return out


@part
def _dot(row, x):
    total = f32(0)
    first = 0
    if are_bfloat16(x):
        first = len(x) // STEP * STEP
        total = dot(row.ctypes.data, x.ctypes.data, first // STEP)
    for i in range(first, len(x)):
        total += as_float(row[i]) * as_float(x[i])
    return total


@part
def _multiply_several(matrix, tokens, out):
    """Write what whole vectors of a row and of each token give, `MOST` tokens at once."""
    num_rows, size = matrix.shape
    steps = size // (64 // tokens.itemsize)
    stride = size * tokens.itemsize
    sums = np.empty(MOST, np.float32)
    row = matrix.ctypes.data
    x = tokens.ctypes.data
    to = sums.ctypes.data
    for o in range(num_rows):
        own = row + o * size * matrix.itemsize
        for first in range(0, len(tokens), MOST):
            count = min(MOST, len(tokens) - first)
            place = x + first * stride
            if count == 1:
                dots_of_1(own, place, stride, steps, to, matrix, tokens)
            elif count == 2:
                dots_of_2(own, place, stride, steps, to, matrix, tokens)
            elif count == 3:
                dots_of_3(own, place, stride, steps, to, matrix, tokens)
            else:
                dots_of_4(own, place, stride, steps, to, matrix, tokens)
            for t in range(count):
                out[first + t, o] = sums[t]


@part
def _multiply(matrix, tokens, out):
    """Write out [T, O], float32: a matrix [O, I] times tokens [T, I]. A row is read from memory for
    all tokens; its sum with one does not depend on the others."""
    num_rows, size = matrix.shape
    steps = size // (64 // tokens.itemsize)
    stride = size * tokens.itemsize
    # asked for once: that takes longer than a short row does
    row = matrix.ctypes.data
    x = tokens.ctypes.data
    to = out.ctypes.data
    if len(tokens) == 1:
        for o in range(num_rows):
            own = row + o * size * matrix.itemsize
            dots_of_1(own, x, stride, steps, to + o * out.itemsize, matrix, tokens)
    else:
        _multiply_several(matrix, tokens, out)
    first_left = steps * 64 // tokens.itemsize
    for o in range(num_rows if first_left < size else 0):
        for t in range(len(tokens)):
            total = out[t, o]
            for i in range(first_left, size):
                total += as_float(matrix[o, i]) * as_float(tokens[t, i])
            out[t, o] = total


@part
def swiglu(gate, up, like):
    """Return silu(gate) * up, rounded where the module rounds."""
    gate = rounded(gate, like)
    up = rounded(up, like)
    return rounded(rounded(gate / (f32(1) + np.exp(-gate)), like) * up, like)


@part
def add_expert(inner, down, tokens, acts, out, like):
    """Add an expert on tokens [T, H] to `out` [T, H]. Gate and up lie at address `inner` as
    [2 I, H], down at its own as [H, I]; `acts` [T, I] is overwritten."""
    hidden = tokens.shape[1]
    num_neurons = acts.shape[1]
    gate_up = carray(pointer(inner, like), (2 * num_neurons, hidden))
    both = np.empty((len(tokens), 2 * num_neurons), np.float32)
    _multiply(gate_up, tokens, both)
    for t in range(len(tokens)):
        for n in range(num_neurons):
            acts[t, n] = as_stored(swiglu(both[t, n], both[t, num_neurons + n], like), acts)
    own = np.empty((len(tokens), hidden), np.float32)
    _multiply(carray(pointer(down, like), (hidden, num_neurons)), acts, own)
    out += own


@part
def _sigmoid(value):
    return f32(1) / (f32(1) + np.exp(-value))


@part
def _of_rule(gate, rule):
    """Return the activation of gate by a rule that has no constants."""
    if rule == SILU:
        return gate / (f32(1) + np.exp(-gate))
    if rule == GELU:
        return f32(0.5) * gate * (f32(1) + f32(erf(gate * f32(0.7071067811865476))))
    if rule == GELU_TANH:  # 1 + tanh(z) is twice the sigmoid of 2 z
        cubic = gate + f32(0.044715) * gate * gate * gate
        return gate * _sigmoid(f32(1.5957691216057308) * cubic)
    positive = gate if gate > f32(0) or gate != gate else f32(0)
    return positive * positive


@part
def activated(gate, up, rule, has_up, constants, like):
    """Return the activation of a neuron by a `runtime.kernels.gates.Gate`, rounded where the module
    rounds: its rule's number, and alpha and the limit, infinite for none."""
    gate = rounded(gate, like)
    if not has_up:
        return rounded(_of_rule(gate, rule), like)
    alpha, limit = constants
    up = rounded(up, like)
    gate = rounded(limit, like) if gate > limit else gate
    up = rounded(limit if up > limit else -limit if up < -limit else up, like)
    if rule == SCALED:
        own = gate * rounded(_sigmoid(rounded(gate * alpha, like)), like)
        return rounded(rounded(up + f32(1), like) * rounded(own, like), like)
    return rounded(rounded(_of_rule(gate, rule), like) * up, like)


_GATE = "int64, boolean, UniTuple(float32, 2)"  # rule, has_up, constants


@kernel([f"void(int64[::1], int64[::1], {_GATE}, {TOKEN}, {like})" for like in LIKE], nogil=True)
def add_segments(addresses, neurons, rule, has_up, constants, x, rows, y, like):
    """Add segment i on x [H] to y[rows[i]]. Its neurons[i] neurons lie at addresses[i], each as its
    row of gate, its row of up if it has one, and its column of down. addresses, neurons and rows
    [n], y [K, H]."""
    hidden = len(x)
    token = as_factors(x, like)
    for i in range(len(rows)):
        last = 2 if has_up else 1
        data = carray(pointer(addresses[i], like), (neurons[i], last + 1, hidden))
        out = y[rows[i]]
        for n in range(neurons[i]):
            gate = _dot(data[n, 0], token)
            up = _dot(data[n, 1], token) if has_up else gate
            act = activated(gate, up, rule, has_up, constants, like)
            down = data[n, last]
            for h in range(hidden):
                out[h] += act * as_float(down[h])


@kernel(
    [f"void(float32[:], float32[:], float32[::1], {_GATE}, {like})" for like in LIKE], nogil=True
)
def activate(gate, up, acts, rule, has_up, constants, like):
    """Write acts [I] by `activated`."""
    for n in range(len(acts)):
        acts[n] = activated(gate[n], up[n], rule, has_up, constants, like)


@part
def _biased(value, bias, like):
    """Add a bias as the module does, with rounding before and after."""
    return rounded(rounded(value, like) + as_float(bias), like)


@kernel([f"void(float32[::1], int64, {like})" for like in LIKE], nogil=True)
def add_bias(y, bias, like):
    """Add the bias [O] at this address to y [O]."""
    biases = carray(pointer(bias, like), (len(y),))
    for h in range(len(y)):
        y[h] = _biased(y[h], biases[h], like)


@kernel([f"void(float32[:, ::1], float32[::1], int64, {out})" for out in LIKE], nogil=True)
def combine(y, weights, num_rows, out):
    """Write out [H]: the sum, in order, of the first `num_rows` rows of y [K, H] times their
    weights [K]."""
    for h in range(y.shape[1]):
        total = f32(0)
        for i in range(num_rows):
            total = rounded(total + rounded(rounded(y[i, h], out) * weights[i], out), out)
        out[h] = as_stored(total, out)


@part
def products(address, bias, x, count, like):
    """Return [T, O], float32: the matrix [O, I] at `address` times x [T, I], which was rounded,
    plus the bias [O] at its address unless that is 0."""
    matrix = carray(pointer(address, like), (count, x.shape[1]))
    biases = carray(pointer(bias, like), count)
    tokens = as_factors(x.ravel(), like).reshape(x.shape)
    out = np.empty((len(x), count), np.float32)
    _multiply(matrix, tokens, out)
    if bias:
        for t in range(len(x)):
            for o in range(count):
                out[t, o] += as_float(biases[o])
    return out


_KINDS = ("uint16", "int16", "float32")


@kernel([f"void(int64, int64, {kind}[:, ::1], {kind}[:, ::1])" for kind in _KINDS], nogil=True)
def project(address, bias, x, out):
    """Write out [T, O]: the matrix [O, I] at `address` times x [T, I], plus the bias [O] at its
    address unless that is 0."""
    sums = products(address, bias, x, out.shape[1], x.ravel())
    for t in range(len(out)):
        for o in range(out.shape[1]):
            out[t, o] = as_stored(rounded(sums[t, o], out), out)

"""The step of a row through a trellis, in vectors of 16 states. Importing this module imports numba.

Float32 in one order, without fused operations: the same costs on every machine.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import F32, I8, I64, advanced, filled, load, splat, spread, store, vector

LANES = 16
_COSTS, _WAYS = vector(F32, LANES), vector(I8, LANES)


def _step(bits: int) -> Callable[..., None]:
    """Return `step(before, after, choices, values, x, price, num_states)` of a row with so many bits of its own.

    It writes to `after` float32 [states] the least cost of a path to each state: of `before` float32 [states], over the
    states that may follow, and `price * (x - values)^2`. `choices` uint8 [states >> bits] gets the upper bits of the
    state that follows, the lowest where several cost the same. The first four are addresses, and there are at least 256
    states.
    """
    ways = 1 << bits

    @intrinsic
    def step(context, before, after, choices, values, x, price, num_states):
        def generate(target, builder, _, arguments):
            before, after, choices, values, x, price, num_states = arguments
            x, price = splat(builder, x, LANES), splat(builder, price, LANES)
            part = builder.lshr(num_states, I64(bits))
            with cgutils.for_range(builder, builder.udiv(part, I64(LANES)), intp=I64) as loop:
                following = advanced(builder, before, loop.index, 4 * LANES)
                lowest, choice = _least(builder, following, builder.mul(part, I64(4)), ways)
                if bits:
                    store(builder, choice, advanced(builder, choices, loop.index, LANES))
                own = advanced(builder, I64(0), loop.index, 4 * LANES * ways)
                for place in range(ways):
                    offset = I64(4 * LANES * place)
                    value = load(builder, builder.add(builder.add(values, own), offset), _COSTS)
                    error = builder.fsub(x, value)
                    cost = builder.fmul(price, builder.fmul(error, error))
                    of_lanes = spread(builder, lowest, [(LANES * place + lane) >> bits for lane in range(LANES)])
                    store(builder, builder.fadd(of_lanes, cost), builder.add(builder.add(after, own), offset))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 4, types.float32, types.float32, types.int64), generate

    return step


def _least(builder: ir.IRBuilder, address: ir.Value, stride: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
    """The least of so many vectors that lie `stride` bytes apart, and which it is."""
    lowest, choice = load(builder, address, _COSTS), filled(_WAYS, 0)
    for way in range(1, count):
        cost = load(builder, advanced(builder, address, I64(way), stride), _COSTS)
        is_less = builder.fcmp_ordered("<", cost, lowest)
        lowest = builder.select(is_less, cost, lowest)
        choice = builder.select(is_less, filled(_WAYS, way), choice)
    return lowest, choice


STEPS = tuple(_step(bits) for bits in range(5))

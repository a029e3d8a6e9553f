"""The step of a row through a trellis, in vectors of 32 states. Importing this module imports
numba.

Costs are whole numbers of 16 bits, which stop at the largest: the same on every machine.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    I16,
    I32,
    I64,
    advanced,
    called,
    chosen_of_64,
    filled,
    load,
    splat,
    spread,
    store,
    vector,
)
from artifacts.common.lookups import HAS_LOOKUPS

LANES = 32
_COSTS = vector(I16, LANES)
_FAR = 0xFFFF


def _step(bits: int, *, looks_up: bool) -> Callable[..., int]:
    """Return `step(before, after, choices, hashes, costs, less, num_states)` of a row with `bits`
    bits of its own.

    It writes the least cost of a path to each state to `after` uint16 [states]. This is the least
    of `before` uint16 [states], less `less`, over the states that may follow, plus the cost of the
    state itself. The state's cost is the one of `costs` uint16 [64] at `hashes` uint16 [states],
    or, if nothing is looked up, of `costs` [states].

    `choices` gets the bits of the way to the state that follows, which are its upper bits; of
    several ways that cost the same, the lowest. For each of the bits, the lowest first, it holds a
    row of bits [states >> bits]. The step returns the number that `less` may be in the next step.
    The first five arguments are addresses, and there are at least 32 states beside the bits: 32 <<
    bits.
    """
    ways = 1 << bits

    @intrinsic
    def step(context, before, after, choices, hashes, costs, less, num_states):
        def generate(target, builder, _, arguments):
            before, after, choices, hashes, costs, less, num_states = arguments
            part = builder.lshr(num_states, I64(bits))
            less = splat(builder, builder.trunc(less, I16), LANES)
            tables = [load(builder, costs, _COSTS, 64 * half) for half in range(2)]
            least = cgutils.alloca_once_value(builder, filled(_COSTS, _FAR))
            with cgutils.for_range(builder, builder.udiv(part, I64(LANES)), intp=I64) as loop:
                following = advanced(builder, before, loop.index, 2 * LANES)
                stride = builder.shl(part, I64(1))
                places = [advanced(builder, following, I64(way), stride) for way in range(ways)]
                lowest, planes = _least(builder, [load(builder, place, _COSTS) for place in places])
                for bit, plane in enumerate(planes):
                    row = advanced(builder, choices, I64(bit), builder.lshr(part, I64(3)))
                    store(
                        builder,
                        builder.bitcast(plane, I32),
                        advanced(builder, row, loop.index, LANES // 8),
                    )
                lowest = called(builder, "llvm.usub.sat.v32i16", _COSTS, [lowest, less])
                builder.store(_lower(builder, lowest, builder.load(least))[0], least)
                for place in range(ways):
                    at = advanced(builder, I64(2 * LANES * place), loop.index, 2 * LANES * ways)
                    read = load(builder, builder.add(hashes if looks_up else costs, at), _COSTS)
                    cost = chosen_of_64(builder, tables, read) if looks_up else read
                    of_lanes = spread(
                        builder, lowest, [(LANES * place + lane) >> bits for lane in range(LANES)]
                    )
                    total = called(builder, "llvm.uadd.sat.v32i16", _COSTS, [of_lanes, cost])
                    store(builder, total, builder.add(after, at))
            return builder.zext(_least_of_lanes(builder, builder.load(least)), I64)

        return types.int64(*[types.int64] * 7), generate

    return step


def _lower(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The lower of two vectors by lanes, and where it is the first."""
    is_first = builder.icmp_unsigned("<", one, other)
    return builder.select(is_first, one, other), is_first


def _least(builder: ir.IRBuilder, costs: Sequence[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
    """Return the least of vectors by lanes, and the bits of its index, the lowest first."""
    if len(costs) == 1:
        return costs[0], []
    half = len(costs) // 2
    (low, low_bits), (high, high_bits) = (
        _least(builder, part) for part in (costs[:half], costs[half:])
    )
    least, is_high = _lower(builder, high, low)
    return least, [
        builder.select(is_high, *pair) for pair in zip(high_bits, low_bits, strict=True)
    ] + [is_high]


def _least_of_lanes(builder: ir.IRBuilder, costs: ir.Value) -> ir.Value:
    for half in (16, 8, 4, 2, 1):
        costs, _ = _lower(
            builder, costs, spread(builder, costs, [lane ^ half for lane in range(LANES)])
        )
    return builder.extract_element(costs, I32(0))


PLAIN_STEPS = tuple(_step(bits, looks_up=False) for bits in range(5))
"""Steps by the bits of a row; costs are given for each state."""

STEPS = tuple(_step(bits, looks_up=True) for bits in range(5)) if HAS_LOOKUPS else PLAIN_STEPS
"""Steps by the bits of a row; costs are looked up where the processor can."""

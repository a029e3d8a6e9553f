"""GPTQ's 4-bit matrices whose groups do not follow each other (`desc_act`), times one token. Importing this module
imports numba.

The inputs of a group are multiplied in quads: for each byte of a word one whose code is there, all in the low or all in
the high half of their bytes. Where a group has fewer in one byte than in another, quads are filled up with zeros. A
panel of outputs is copied first, so that its words, read eight times in any order, lie in the nearest cache.
"""

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I8, I32, I64, advanced, filled, load, splat, store, vector
from runtime.kernels.cpu.column_vectors import DIGITS, UNIT, add_quads, add_scaled_4
from runtime.kernels.cpu.digits import in_digits
from runtime.kernels.cpu.gated import part
from runtime.kernels.cpu.lanes import LANES, PAIRS, chosen, prefetch
from runtime.kernels.cpu.published import CODES, NUM_GROUPS, SCALE_TYPE, SCALES, ZERO_OFFSET, ZEROS, read_scales

ACT_ORDER_PANEL = 32  # outputs
_BLOCKS, _ROW = ACT_ORDER_PANEL // LANES, 4 * ACT_ORDER_PANEL  # bytes
_QUADS = UNIT // 4


@intrinsic
def _copy_panel(context, words, stride, num_rows, out):
    """Copy the words of a panel, and ask for those of the next."""

    def generate(target, builder, signature, arguments):
        words, stride, num_rows, out = arguments
        with cgutils.for_range(builder, num_rows, intp=I64) as loop:
            row, copy = advanced(builder, words, loop.index, stride), advanced(builder, out, loop.index, _ROW)
            for offset in range(0, _ROW, 64):
                prefetch(builder, builder.add(row, I64(_ROW + offset)), cache=2)
                store(builder, load(builder, row, PAIRS, offset), builder.add(copy, I64(offset)))
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _add_quads_of_codes(context, words, shift, offsets, digits, first, num_quads, sums):
    """Add quads of codes, from number `first` on, to the sums of a panel, int32 [PANEL / 16, 2, 16]. `offsets` [., 4]
    has where the words of each input begin, int32 bytes from `words`, and `digits` [., 2, 32] has its digits."""
    bytes_ = vector(I8, 4 * LANES)

    def generate(target, builder, signature, arguments):
        words, shift, offsets, digits, first, num_quads, sums = arguments
        shift = splat(builder, builder.trunc(shift, I32))
        addresses = [builder.add(sums, I64(64 * i)) for i in range(DIGITS * _BLOCKS)]
        totals = [cgutils.alloca_once_value(builder, load(builder, address, PAIRS)) for address in addresses]
        with cgutils.for_range(builder, num_quads, intp=I64) as loop:
            quad = builder.add(first, loop.index)
            where, unit = (
                advanced(builder, offsets, quad, 16),
                advanced(builder, digits, builder.udiv(quad, I64(8)), 64),
            )
            own_x = advanced(builder, unit, builder.urem(quad, I64(8)), 4)
            x = [splat(builder, load(builder, own_x, I32, UNIT * digit)) for digit in range(DIGITS)]
            places = [builder.zext(load(builder, where, I32, 4 * byte), I64) for byte in range(4)]
            rows = [builder.add(words, place) for place in places]
            for block in range(_BLOCKS):
                codes = load(builder, rows[0], bytes_, 64 * block)
                for byte in range(1, 4):
                    lanes = [lane + (4 * LANES if lane % 4 == byte else 0) for lane in range(4 * LANES)]
                    codes = chosen(builder, codes, load(builder, rows[byte], bytes_, 64 * block), lanes)
                codes = builder.lshr(builder.bitcast(codes, PAIRS), shift)
                codes = builder.and_(codes, filled(PAIRS, 0x0F0F0F0F))
                for digit, total in zip(x, totals[DIGITS * block :], strict=False):
                    builder.store(add_quads(builder, builder.load(total), codes, digit), total)
        for total, address in zip(totals, addresses, strict=True):
            store(builder, builder.load(total), address)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@part
def _quads_of_groups(index, num_groups):
    """Where the quads of each group begin, whole units [G + 1], and how many are of low and of high halves [G, 2]."""
    counts, starts = np.zeros((num_groups, 2, 4), np.int64), np.zeros(num_groups + 1, np.int64)
    num_quads = np.zeros((num_groups, 2), np.int64)
    for k in range(len(index)):
        counts[index[k], k % 2, k % 8 // 2] += 1
    for group in range(num_groups):
        for half in range(2):
            num_quads[group, half] = counts[group, half].max()
        total = num_quads[group, 0] + num_quads[group, 1]
        starts[group + 1] = starts[group] + (total + _QUADS - 1) // _QUADS * _QUADS
    return starts, num_quads


@part
def _in_quads(index, x, starts, num_quads):
    """The inputs in their quads: where the words of each begin in a panel [., 4], and its x."""
    offsets, token = np.zeros((starts[-1], 4), np.int32), np.zeros((starts[-1], 4), np.float32)
    places = np.zeros((len(num_quads), 2, 4), np.int64)
    for group in range(len(num_quads)):
        places[group, 0], places[group, 1] = starts[group], starts[group] + num_quads[group, 0]
    for k in range(len(index)):
        group, half, byte = index[k], k % 2, k % 8 // 2
        place = places[group, half, byte]
        places[group, half, byte] += 1
        offsets[place, byte], token[place, byte] = k // 8 * _ROW, x[k]
    return offsets, token.reshape(4 * len(token))


@part
def add_act_order(fields, start, index, x, num_fast, y):
    """Add the first outputs, whole panels of a matrix whose inputs are of the groups in `index` [I]."""
    num_groups, num_rows, num_zeros = fields[NUM_GROUPS], len(x) // 8, len(y) // 8
    starts, num_quads = _quads_of_groups(index, num_groups)
    offsets, token = _in_quads(index, x, starts, num_quads)
    digits, worth, sums_x = in_digits(token, starts // _QUADS)
    scales, sums = np.empty((num_groups, len(y)), np.float32), np.empty(DIGITS * ACT_ORDER_PANEL, np.int32)
    for group in range(num_groups):
        read_scales(start + fields[SCALES], fields[SCALE_TYPE], group * len(y), -1, 0, scales[group])
    panel_words = np.empty((num_rows, ACT_ORDER_PANEL), np.int32)
    words, own_sums = panel_words.ctypes.data, sums.ctypes.data
    for panel in range(0, num_fast, ACT_ORDER_PANEL):
        _copy_panel(start + fields[CODES] + 4 * panel, 4 * len(y), num_rows, words)
        for group in range(num_groups):
            sums[:] = 0
            first, (low, high) = starts[group], num_quads[group]
            _add_quads_of_codes(words, 0, offsets.ctypes.data, digits.ctypes.data, first, low, own_sums)
            _add_quads_of_codes(words, 4, offsets.ctypes.data, digits.ctypes.data, first + low, high, own_sums)
            zeros = start + fields[ZEROS] + 4 * group * num_zeros + panel // 2
            own = (zeros, fields[ZERO_OFFSET], scales[group, panel:].ctypes.data, worth[group], sums_x[group])
            add_scaled_4(*own, _BLOCKS, own_sums, y[panel:].ctypes.data)

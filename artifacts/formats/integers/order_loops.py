"""Compiled loops that put codes into the order of their groups, and AWQ's into GPTQ's, where they
lie. Importing this module imports numba.

Codes are moved in words of adjacent outputs, one panel of outputs at a time, which stays in a
core's cache. A word is made from as many words as it has codes, each rotated so that its code comes
to its place.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    I32,
    I64,
    advanced,
    called,
    filled,
    load,
    splat,
    store,
    vector,
)
from artifacts.common.numba_loops import exact_part, kernel
from artifacts.common.transposition import in_turns, transpose
from artifacts.formats.integers.awq import ORDER as PLACES
from artifacts.formats.integers.column_loops import read_codes
from artifacts.formats.integers.order import INPUT_BITS

IN_ORDER, IN_ANOTHER_ORDER, BEYOND = range(3)
"""Results of `sort`: groups that follow each other, groups in another order, or numbers of no
group."""

_INPUT = np.int32((1 << INPUT_BITS) - 1)
_PANEL = 64  # outputs
_LANES = 16
_WORDS = vector(I32, _LANES)
_SIDE = len(PLACES)  # codes of 4 bits in a word


@kernel("int64(int32[::1], int64, int64)", nogil=True, exact=True)
def sort(index, num_groups, lacking):
    """Sort the inputs by their groups, then by their numbers, and write group times 2^`INPUT_BITS`
    plus input for each place over the groups by input. Groups that are all `lacking` follow each
    other."""
    width = -(-len(index) // num_groups)
    if (index == lacking).all():
        for k in range(len(index)):
            index[k] = np.int32(k // width << INPUT_BITS | k)
        return IN_ORDER
    starts = np.zeros(num_groups + 1, np.int64)
    groups = index.copy()
    last = 0
    is_moved = False
    for group in groups:
        if not 0 <= group < num_groups:
            return BEYOND
        starts[group + 1] += 1
        is_moved |= group < last
        last = group
    for group in range(num_groups):
        starts[group + 1] += starts[group]
    for k in range(len(groups)):
        index[starts[groups[k]]] = np.int32(groups[k] << INPUT_BITS | k)
        starts[groups[k]] += 1
    return IN_ANOTHER_ORDER if is_moved else IN_ORDER


def _gathering(bits: int):
    """Return `gather(words, rows, turns, num_words, out, stride)`. It writes `num_words` rows of
    words of a panel to `out`, `stride` bytes apart. Code j of row w is in the row of `words` that
    begins at byte rows[w, j], and comes to its place when that row is rotated by turns[w, j]
    bits."""
    per_word = 32 // bits

    @intrinsic
    def gather(context, words, rows, turns, num_words, out, stride):
        def generate(target, builder, signature, arguments):
            words, rows, turns, num_words, out, stride = arguments
            with cgutils.for_range(builder, num_words, intp=I64) as loop:
                own_rows, own_turns = (
                    advanced(builder, each, loop.index, 4 * per_word) for each in (rows, turns)
                )
                gathered = [filled(_WORDS, 0)] * (_PANEL // _LANES)
                for code in range(per_word):
                    row = builder.add(
                        words, builder.zext(load(builder, own_rows, I32, 4 * code), I64)
                    )
                    turn = splat(builder, load(builder, own_turns, I32, 4 * code))
                    mask = ((1 << bits) - 1) << bits * code
                    for block, others in enumerate(gathered):
                        read = load(builder, row, _WORDS, 64 * block)
                        own = called(builder, "llvm.fshr.v16i32", _WORDS, [read, read, turn])
                        own = builder.and_(own, filled(_WORDS, mask))
                        gathered[block] = builder.or_(
                            builder.and_(others, filled(_WORDS, ~mask)), own
                        )
                for block, own in enumerate(gathered):
                    store(
                        builder,
                        own,
                        builder.add(advanced(builder, out, loop.index, stride), I64(64 * block)),
                    )
            return target.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return gather


_gather_2, _gather_4, _gather_8 = (_gathering(bits) for bits in (2, 4, 8))


@exact_part
def _gather_one_by_one(words, bits, order, out):
    """Put codes of any width into their order, also codes that lie in two words."""
    codes = np.empty(words.shape[1], np.int32)
    outputs = slice(0, words.shape[1])
    out[:] = 0
    for place in range(len(order)):
        read_codes(words, bits, order[place] & _INPUT, outputs, codes)
        row = place * bits // 32
        shift = np.uint32(place * bits % 32)
        for i in range(len(codes)):
            out[row, i] |= np.int32(np.uint32(codes[i]) << shift)
        if shift + bits > 32:
            for i in range(len(codes)):
                out[row + 1, i] |= codes[i] >> np.int32(32 - shift)


@exact_part
def _sources(bits, order):
    """Return for the code at each place the byte at which its row of a panel begins, and by how
    many bits that row is rotated."""
    rows = np.empty(len(order), np.int32)
    turns = np.empty(len(order), np.int32)
    per_word = 32 // bits
    for place in range(len(order)):
        k = order[place] & _INPUT
        rows[place] = k // per_word * (4 * _PANEL)
        turns[place] = (k % per_word - place % per_word) * bits & 31
    return rows, turns


@exact_part
def _gather(words, bits, order, rows, turns, out):
    """Write the words of a panel in their order. `words` are rows of `_PANEL` words; `out` may have
    fewer words a row."""
    if bits == 3 or out.shape[1] < _PANEL:
        _gather_one_by_one(words[:, : out.shape[1]], bits, order, out)
        return
    places = rows.ctypes.data, turns.ctypes.data, len(out), out.ctypes.data, out.strides[0]
    if bits == 2:
        _gather_2(words.ctypes.data, *places)
    elif bits == 4:
        _gather_4(words.ctypes.data, *places)
    else:
        _gather_8(words.ctypes.data, *places)


@kernel("void(int32[:, ::1], int32[::1])", nogil=True, exact=True)
def move_columns(words, order):
    """Put codes in a stream of words down the inputs [w, out] into their order."""
    bits = 32 * len(words) // len(order)
    before = np.empty((len(words), _PANEL), np.int32)
    rows, turns = _sources(bits, order)
    for first in range(0, words.shape[1], _PANEL):
        panel = words[:, first : first + _PANEL]
        stop = min(first + _PANEL, words.shape[1])
        for row in range(len(words)):
            own = words[row, first:stop]
            copy = before[row]
            for i in range(len(own)):
                copy[i] = own[i]
        _gather(before, bits, order, rows, turns, panel)


@kernel("void(int32[:, ::1], int32[::1])", nogil=True, exact=True)
def move_rows(words, order):
    """Put codes in words along the inputs [out, w] into their order."""
    num_words = words.shape[1]
    before = np.empty((num_words, _PANEL), np.int32)
    after = np.empty((num_words, _PANEL), np.int32)
    bits = 32 * num_words // len(order)
    rows, turns = _sources(bits, order)
    for first in range(0, len(words), _PANEL):
        panel = words[first : first + _PANEL]
        transpose(panel, before[:, : len(panel)])
        own = after[:, : len(panel)]
        _gather(before, bits, order, rows, turns, own)
        transpose(own, panel)


@intrinsic
def _turn(context, rows, stride, count, out):
    """Write eight rows of AWQ's words, `stride` bytes apart, to `out` as words of eight inputs of
    one output, for `count` times 16 words of each row."""

    def generate(target, builder, signature, arguments):
        rows, stride, count, out = arguments
        with cgutils.for_range(builder, count, intp=I64) as loop:
            first = advanced(builder, rows, loop.index, 4 * _LANES)
            words = [
                load(builder, advanced(builder, first, I64(row), stride), _WORDS)
                for row in range(_SIDE)
            ]
            for step in (4, 2, 1):  # each moves one bit of the row's number into the place's
                for row in range(_SIDE):
                    if not row & step:
                        words[row], words[row + step] = _codes_swapped(
                            builder, words[row], words[row + step], 4 * step
                        )
            by_output = [words[place] for place in np.argsort(PLACES)]
            own = advanced(builder, out, loop.index, 4 * _LANES * _SIDE)
            for i, turned in enumerate(in_turns(builder, by_output)):
                store(builder, turned, builder.add(own, I64(4 * _LANES * i)))
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _codes_swapped(
    builder: ir.IRBuilder, one: ir.Value, other: ir.Value, bits: int
) -> tuple[ir.Value, ir.Value]:
    """Return two vectors of words, of whose runs of `bits` bits every second of the first has
    changed places with the one before it of the other."""
    low = filled(_WORDS, sum((1 << bits) - 1 << place for place in range(0, 32, 2 * bits)))
    apart = filled(_WORDS, bits)
    high = builder.not_(low)
    return (
        builder.or_(builder.and_(one, low), builder.shl(builder.and_(other, low), apart)),
        builder.or_(builder.lshr(builder.and_(one, high), apart), builder.and_(other, high)),
    )


@kernel("void(int32[:, ::1])", nogil=True, exact=True)
def turn_words(words):
    """Put 4-bit codes whose words have eight outputs of one input, in AWQ's order, into words [in /
    8, out] of eight inputs of one output."""
    num_words = words.shape[1] // _SIDE
    count = (num_words + _LANES - 1) // _LANES
    stored = np.zeros((_SIDE, count * _LANES), np.int32)
    turned = np.empty(stored.size, np.int32)
    for block in range(len(words)):
        own = words[block]
        for row in range(_SIDE):
            for i in range(num_words):
                stored[row, i] = own[row * num_words + i]
        _turn(stored.ctypes.data, stored.strides[0], count, turned.ctypes.data)
        for i in range(len(own)):
            own[i] = turned[i]


@kernel("void(int32[:, ::1])", nogil=True, exact=True)
def turn_zeros(words):
    """Put eight codes of 4 bits in each word from AWQ's order into the order of their outputs."""
    flat = words.reshape(words.size)
    for i in range(len(flat)):
        word = np.uint32(flat[i])
        turned = np.uint32(0)
        for place in range(_SIDE):
            code = np.uint32(word >> np.uint32(4 * place)) & np.uint32(15)
            turned |= np.uint32(code << np.uint32(4 * PLACES[place]))
        flat[i] = np.int32(turned)

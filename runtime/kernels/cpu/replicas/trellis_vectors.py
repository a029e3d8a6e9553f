"""Rows of trellis codes times a token in whole numbers of 16 bits, written in vectors of 32
neighbouring columns.

A row of a vector takes five instructions. Two neighbouring words are shifted to the row's window, a
product leaves the hash in its upper bits, and a shift makes it an index. A table of 64 gives the
level, and levels are multiplied by pairs of columns and added. Operands are int64 addresses and
counts. Importing this module imports numba.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    advanced,
    called,
    chosen_of_64,
    filled,
    load,
    splat,
    store,
    vector,
)
from artifacts.common.numba_loops import kernel
from artifacts.quantisation.trellis.trellis import HALF_BITS
from runtime.kernels.cpu.lanes import NUMBERS, PAIRS, SUMS, chosen, each_added_up, prefetch

ROWS = 16
"""Rows of a block: it begins with a word, or in the middle of one where half bits are odd."""

UNIT = 32
"""Columns of a vector."""

MOST_COLUMNS = 8192
"""Largest number of columns for which sums of levels times numbers of 16 bits are whole numbers of
32 bits."""

LEVELS = 3
"""Place in `functions` of the function that writes levels; the function for V vectors of numbers is
at V // 2."""

_HAS_WORD_TABLES, _HAS_DOT, _HAS_BYTE_TABLES = (
    name in FEATURES for name in ("avx512bw", "avx512vnni", "avx2")
)
AT_ONCE = 4 if _HAS_WORD_TABLES else 1
"""Number of vectors that share levels: as many as there are registers for their sums."""

_FUNCTION = ir.FunctionType(ir.VoidType(), [I64] * 12)
_TABLE_NBYTES = 128  # of 64 levels
_SUMS_AT_ONCE = 16 if _HAS_WORD_TABLES else 4


class _Block:
    """Block of 16 rows of codes with `half_bits` half bits; `phase` bits of the first word belong
    to the rows before."""

    def __init__(
        self, builder: ir.IRBuilder, half_bits: int, phase: int, operands: Sequence[ir.Value]
    ) -> None:
        words, self._stride, left, num_words, self._count, tables, multiplier, self.place = operands
        self._builder = builder
        self._half_bits = half_bits
        self._phase = phase
        self._starts_of_tables = [builder.add(tables, I64(_TABLE_NBYTES * odd)) for odd in range(2)]
        self._tables = [
            [load(builder, tables, NUMBERS, _TABLE_NBYTES * odd + 64 * half) for half in range(2)]
            for odd in range(2)
        ]
        self._multiplier = splat(builder, builder.trunc(multiplier, I16), UNIT)
        self._starts = []
        for index in map(I64, range(half_bits // 2 + 2)):  # the stream is circular
            place = builder.select(
                builder.icmp_signed("<", index, left), index, builder.sub(index, num_words)
            )
            self._starts.append(advanced(builder, words, place, self._stride))

    def over_columns(self, take: Callable[[ir.Value, ir.Value | None], None]) -> None:
        """Call `take` for every vector of columns with its index and the number of columns from it
        on, which may be None for a full vector."""
        builder = self._builder
        # there are masks for words, which cost less than a second copy of the loop
        if _HAS_WORD_TABLES:
            num_vectors = builder.udiv(builder.add(self._count, I64(UNIT - 1)), I64(UNIT))
            with cgutils.for_range(builder, num_vectors, intp=I64) as loop:
                take(loop.index, builder.sub(self._count, builder.mul(loop.index, I64(UNIT))))
            return
        whole, remaining = (
            divide(self._count, I64(UNIT)) for divide in (builder.udiv, builder.urem)
        )
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            take(loop.index, None)
        with builder.if_then(builder.icmp_unsigned(">", remaining, I64(0))):
            take(whole, remaining)

    def levels(
        self, rows: range, index: ir.Value, remaining: ir.Value | None
    ) -> Iterator[tuple[int, ir.Value]]:
        """Yield these rows with their levels in a vector of columns."""
        bits = [self._phase + self._half_bits * row // 2 for row in rows]
        needed = range(bits[0] // 16, bits[-1] // 16 + 2)
        words = {word: self._columns(self._starts[word], index, remaining) for word in needed}
        hashes = {}
        for row, bit in zip(rows, bits, strict=True):
            if bit not in hashes:  # at half a bit two rows share a window
                hashes[bit] = self._hash(words[bit // 16], words[bit // 16 + 1], bit % 16)
            yield row, self._looked_up(row % 2, hashes[bit])

    def _columns(self, start: ir.Value, index: ir.Value, remaining: ir.Value | None) -> ir.Value:
        """Return one word of 32 columns, with zeros for missing columns, and prefetch the next
        block's."""
        builder = self._builder
        address = advanced(self._builder, start, index, 2 * UNIT)
        prefetch(builder, advanced(builder, address, self._stride, self._half_bits // 2), cache=2)
        return (
            load(builder, address, NUMBERS)
            if remaining is None
            else _load_some(builder, address, remaining)
        )

    def _looked_up(self, odd: int, indices: ir.Value) -> ir.Value:
        """Return the levels of even or odd rows at indices below 64."""
        builder = self._builder
        table = self._tables[odd]
        if _HAS_WORD_TABLES:
            return chosen_of_64(builder, table, indices)
        if _HAS_BYTE_TABLES:
            return _looked_up_in_quarters(builder, table, indices)
        return _looked_up_in_turn(builder, self._starts_of_tables[odd], indices)

    def _hash(self, word: ir.Value, following: ir.Value, shift: int) -> ir.Value:
        """Return the indices of the windows that begin at this bit."""
        builder = self._builder
        if shift:
            word = called(
                builder, "llvm.fshr.v32i16", NUMBERS, [following, word, filled(NUMBERS, shift)]
            )
        return builder.lshr(builder.mul(word, self._multiplier), filled(NUMBERS, 10))


def _load_some(builder: ir.IRBuilder, address: ir.Value, remaining: ir.Value) -> ir.Value:
    """Return the first `remaining` words at this address, or all 32; the words behind them are not
    read."""
    if _HAS_WORD_TABLES:
        pointer = builder.inttoptr(address, NUMBERS.as_pointer())
        operands = [pointer, I32(2), _is_there(builder, remaining), filled(NUMBERS, 0)]
        return called(builder, "llvm.masked.load.v32i16.p0", NUMBERS, operands)
    room = cgutils.alloca_once_value(builder, filled(NUMBERS, 0))
    given = builder.inttoptr(address, I16.as_pointer())
    cgutils.raw_memcpy(builder, builder.bitcast(room, I16.as_pointer()), given, remaining, 2)
    return builder.load(room)


def _store_some(
    builder: ir.IRBuilder, words: ir.Value, address: ir.Value, remaining: ir.Value
) -> None:
    """Store the first `remaining` words, or all 32."""
    if _HAS_WORD_TABLES:
        operands = [
            words,
            builder.inttoptr(address, NUMBERS.as_pointer()),
            I32(2),
            _is_there(builder, remaining),
        ]
        called(builder, "llvm.masked.store.v32i16.p0", ir.VoidType(), operands)
        return
    room = builder.bitcast(cgutils.alloca_once_value(builder, words), I16.as_pointer())
    cgutils.raw_memcpy(builder, builder.inttoptr(address, I16.as_pointer()), room, remaining, 2)


def _is_there(builder: ir.IRBuilder, remaining: ir.Value) -> ir.Value:
    lanes = ir.Constant(NUMBERS, list(range(UNIT)))
    return builder.icmp_unsigned("<", lanes, splat(builder, builder.trunc(remaining, I16), UNIT))


def _looked_up_in_quarters(
    builder: ir.IRBuilder, table: Sequence[ir.Value], indices: ir.Value
) -> ir.Value:
    """Return the levels of a table of 64, in two vectors, at indices below 64, from four tables of
    16 bytes: each gives 0 for an index of another table."""
    kind = vector(I8, 2 * UNIT)
    half = vector(I8, UNIT)
    found = []
    for quarter in range(4):
        numbers = chosen(builder, *table, [*range(16 * quarter, 16 * quarter + 16)] * 2)
        low = builder.trunc(numbers, half)
        own = builder.xor(
            builder.bitcast(indices, kind), ir.Constant(kind, [16 * quarter, 0x80] * UNIT)
        )
        own = called(builder, "llvm.uadd.sat.v64i8", kind, [own, filled(kind, 0x70)])
        parts = [chosen(builder, own, own, range(first, first + UNIT)) for first in (0, UNIT)]
        parts = [called(builder, "llvm.x86.avx2.pshuf.b", half, [low, part]) for part in parts]
        found.append(chosen(builder, *parts, range(2 * UNIT)))
    total = builder.or_(builder.or_(found[0], found[1]), builder.or_(found[2], found[3]))
    total = builder.bitcast(total, NUMBERS)
    return builder.ashr(builder.shl(total, filled(NUMBERS, 8)), filled(NUMBERS, 8))


def _looked_up_in_turn(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    """Return the same from a table at an address, one after another: a loop, which compiles much
    faster than its lanes written out."""
    room = cgutils.alloca_once_value(builder, indices)
    places = builder.ptrtoint(room, I64)
    with cgutils.for_range(builder, I64(UNIT), intp=I64) as loop:
        place = advanced(builder, places, loop.index, 2)
        index = builder.zext(load(builder, place, I16), I64)
        store(builder, load(builder, advanced(builder, table, index, 2), I16), place)
    return builder.load(room)


def _plus_products(
    builder: ir.IRBuilder, sums: ir.Value, levels: ir.Value, x: ir.Value
) -> ir.Value:
    """Add the products of lanes 2 i and 2 i + 1 to sum i."""
    if _HAS_DOT:
        return called(builder, "llvm.x86.avx512.vpdpwssd.512", PAIRS, [sums, levels, x])
    wide = vector(I32, UNIT)
    products = builder.mul(builder.sext(levels, wide), builder.sext(x, wide))
    even, odd = (chosen(builder, products, products, range(first, UNIT, 2)) for first in (0, 1))
    return builder.add(sums, builder.add(even, odd))


Write = Callable[[ir.IRBuilder, "_Block", Sequence[ir.Value]], None]


def _of_every_kind(name: str, write: Write) -> Callable[[], int]:
    """Return the intrinsic that gives the address of a function, for `call`.

    The function takes half bits, whether the block begins in the middle of its first word, the
    address of that word, and the bytes between two rows of words. Then follow the number of these
    rows from it on and in all, the number of columns, and the address of the tables of even and of
    odd rows, int16 [2, 64]. The last are the multiplier, the address for the block's row 0, and two
    operands of its own."""

    @intrinsic
    def address(context):
        def generate(target, builder, signature, arguments):
            function = cgutils.get_or_insert_function(builder.module, _FUNCTION, name)
            _define(function, write)
            return builder.ptrtoint(function, I64)

        return types.int64(), generate

    return address


@intrinsic
def call(context, address, operands):
    """Call the function at this address with a tuple of 12 operands, int64."""

    def generate(target, builder, signature, arguments):
        function = builder.inttoptr(arguments[0], _FUNCTION.as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, arguments[1]))
        return target.get_dummy_value()

    return types.void(address, operands), generate


def _define(function: ir.Function, write: Write) -> None:
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    half_bits, phase, *operands = function.args
    end = function.append_basic_block("end")
    switch = builder.switch(builder.add(builder.mul(half_bits, I64(2)), phase), end)
    for bits, second in ((half, second) for half in HALF_BITS for second in range(1 + half % 2)):
        case = function.append_basic_block(f"rows_{bits}_{second}")
        switch.add_case(I64(2 * bits + second), case)
        builder.position_at_end(case)
        write(builder, _Block(builder, bits, 8 * second, operands[:8]), operands[8:])
        builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()


def _sums_of(num_tokens: int) -> Callable:
    """Return the intrinsic for the function that writes 16 sums, float32, of each of `num_tokens`
    tokens.

    Its own operands are the address of the tokens, int16, and the bytes between two of them. Zeros
    fill the tokens up to a multiple of 32."""

    def write(builder: ir.IRBuilder, block: _Block, own: Sequence[ir.Value]) -> None:
        starts = [advanced(builder, own[0], I64(token), own[1]) for token in range(num_tokens)]
        step = min(_SUMS_AT_ONCE // num_tokens, ROWS // 2)
        for first in range(0, ROWS, step):
            rows = range(first, first + step)
            sums = [
                [cgutils.alloca_once_value(builder, filled(PAIRS, 0)) for _ in starts] for _ in rows
            ]

            def take(index, remaining, rows=rows, sums=sums):
                tokens = [
                    load(builder, advanced(builder, start, index, 2 * UNIT), NUMBERS)
                    for start in starts
                ]
                for row, levels in block.levels(rows, index, remaining):
                    for place, token in zip(sums[row - rows[0]], tokens, strict=True):
                        builder.store(
                            _plus_products(builder, builder.load(place), levels, token), place
                        )

            block.over_columns(take)
            for token, of_token in enumerate(zip(*sums, strict=True)):
                totals = each_added_up(
                    builder, [builder.sitofp(builder.load(own), SUMS) for own in of_token]
                )
                store(builder, totals, builder.add(block.place, I64(4 * (ROWS * token + first))))

    return _of_every_kind(f"trellis_sums_{num_tokens}", write)


def _write_levels(builder: ir.IRBuilder, block: _Block, own: Sequence[ir.Value]) -> None:
    """Write the levels; `own[0]` is the number of bytes between rows."""

    def take(index, remaining):
        for row, levels in block.levels(range(ROWS), index, remaining):
            address = advanced(
                builder, advanced(builder, block.place, I64(row), own[0]), index, 2 * UNIT
            )
            if remaining is None:
                store(builder, levels, address)
            else:
                _store_some(builder, levels, address, remaining)

    block.over_columns(take)


_sums_of_one = _sums_of(1)
_sums_of_two = _sums_of(2)
_sums_of_four = _sums_of(4)
_levels = _of_every_kind("trellis_levels", _write_levels)


@kernel("void(int64[::1])")
def _find(addresses):
    addresses[0] = _sums_of_one()
    addresses[LEVELS] = _levels()
    if AT_ONCE > 1:
        addresses[1] = _sums_of_two()
        addresses[2] = _sums_of_four()


@cache
def functions() -> np.ndarray:
    """Return int64 [4], the addresses of the functions that kernels `call`: 16 sums of one, of two
    and of four tokens, and the levels of 16 rows.

    Kernels call them by address, since otherwise each kernel would compile its own copy."""
    addresses = np.zeros(4, np.int64)
    _find(addresses)
    return addresses

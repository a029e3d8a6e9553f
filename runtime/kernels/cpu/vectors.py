"""Products of codes of 4 and 8 bits with one token, written in vectors, which LLVM would not find in loops.

Codes of 4 bits are multiplied with bfloat16: one instruction looks up the numbers of 32 codes in a table, and another
adds up the products of pairs. Processors with AVX512-BF16 have both; for others LLVM writes them out, which is right
and slow. Numbers in tables are bfloat16 as uint16, sums are float32. Operands are int64 addresses. Importing this
module imports numba.
"""

from collections.abc import Callable, Sequence

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_PAIRS = bool(binding.get_host_cpu_features().get("avx512bf16"))
LANES = 16  # sums in a vector, each of pairs
WORD_ROWS, OUTPUT_ROWS = 4, 8  # that are added at once
PANEL = 64  # outputs of `add_pairs_of_codes`

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FAST = ("contract", "reassoc")


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _vector(element: ir.Type, count: int = 2 * LANES) -> ir.VectorType:
    return ir.VectorType(element, count)


_SUMS, _NUMBERS, _PAIRS = _vector(_f32, LANES), _vector(_i16), _vector(_i32, LANES)


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
    """What lies `offset` bytes behind the address."""
    return builder.load(builder.inttoptr(builder.add(address, _i64(offset)), kind.as_pointer()), align=1)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _next(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, nbytes: int | ir.Value) -> ir.Value:
    """The address `index` times so many bytes further on."""
    return builder.add(address, builder.mul(index, _i64(nbytes) if isinstance(nbytes, int) else nbytes))


def _filled(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _spread(builder: ir.IRBuilder, values: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """A vector of the values with these indices."""
    return builder.shuffle_vector(values, values, ir.Constant(_vector(_i32, len(lanes)), list(lanes)))


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    one = builder.insert_element(ir.Constant(_vector(value.type, LANES), ir.Undefined), value, _i32(0))
    return _spread(builder, one, [0] * LANES)


def _called(builder: ir.IRBuilder, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
    """The result of a function that LLVM knows by this name."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, name),
        operands,
        fastmath=("reassoc",) if "reduce" in name else (),
    )


def _looked_up(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, shift: int) -> ir.Value:
    """Numbers of the codes at this bit of 32 lanes of 16 bits. The table is there twice: the bit above a code does not
    matter."""
    if shift:
        codes = builder.lshr(codes, _filled(_NUMBERS, shift))
    if HAS_PAIRS:
        return _called(builder, "llvm.x86.avx512.permvar.hi.512", _NUMBERS, [table, codes])
    codes = builder.and_(codes, _filled(_NUMBERS, 2 * LANES - 1))
    out = ir.Constant(_NUMBERS, ir.Undefined)
    for lane in map(_i32, range(2 * LANES)):
        out = builder.insert_element(out, builder.extract_element(table, builder.extract_element(codes, lane)), lane)
    return out


def _add_pairs(builder: ir.IRBuilder, sums: ir.Value, numbers: ir.Value, x: ir.Value) -> ir.Value:
    """Add the products of lanes 2 i and 2 i + 1 to sum i."""
    if HAS_PAIRS:
        operands = [builder.bitcast(operand, _vector(_BFloat())) for operand in (numbers, x)]
        return _called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, [sums, *operands])
    for half in (_low, _high):
        sums = _plus_product(builder, sums, half(builder, numbers), half(builder, x))
    return sums


def _low(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """The even lanes as float32."""
    return builder.bitcast(builder.shl(builder.bitcast(numbers, _PAIRS), _filled(_PAIRS, 16)), _SUMS)


def _high(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """The odd lanes as float32."""
    return builder.bitcast(builder.and_(builder.bitcast(numbers, _PAIRS), _filled(_PAIRS, 0xFFFF0000)), _SUMS)


def _added_up(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    return _called(builder, "llvm.vector.reduce.fadd.v16f32", _f32, [ir.Constant(_f32, 0.0), sums])


def _row(products: Callable[..., ir.Value], scales_per_step: int = 1) -> Callable[..., float]:
    """Return `dot(codes, x, scales, table, num_scales, steps)`: a row of codes times x, in steps of 32 bytes of codes.

    A step has this many scales, float32, or, where it is one, `steps` steps have the same. `products` makes the sums of
    a step from the table and the addresses of its codes and its x, which takes 128 bytes.
    """
    lanes = [lane * scales_per_step // LANES for lane in range(LANES)]

    @intrinsic
    def dot(context, codes, x, scales, table, num_scales, steps):
        def generate(target, builder, signature, arguments):
            codes, x, scales, table, num_scales, steps = arguments
            table, sums = _load(builder, table, _NUMBERS), cgutils.alloca_once_value(builder, _filled(_SUMS, 0.0))
            count = builder.sdiv(num_scales, _i64(scales_per_step))
            with cgutils.for_range(builder, count, intp=_i64) as outer:
                address = _next(builder, scales, outer.index, 4 * scales_per_step)
                scale = _spread(builder, _load(builder, address, _vector(_f32, scales_per_step)), lanes)
                with cgutils.for_range(builder, steps, intp=_i64) as inner:
                    step = builder.add(builder.mul(outer.index, steps), inner.index)
                    part = products(builder, table, _next(builder, codes, step, 32), _next(builder, x, step, 128))
                    builder.store(_plus_product(builder, builder.load(sums), part, scale), sums)
            return _added_up(builder, builder.load(sums))

        return types.float32(*[types.int64] * 6), generate

    return dot


def _half_bytes(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """64 codes of 4 bits with x in bfloat16, for the low halves of bytes first."""
    codes, sums = builder.zext(_load(builder, codes, _vector(_i8)), _NUMBERS), _filled(_SUMS, 0.0)
    for half in range(2):
        numbers = _looked_up(builder, table, codes, 4 * half)
        sums = _add_pairs(builder, sums, numbers, _load(builder, x, _NUMBERS, 64 * half))
    return sums


def _bytes(numbers: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Callable[..., ir.Value]:
    """32 numbers of 8 bits with x in float32; `numbers` makes float32 of 16 bytes."""

    def products(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        sums = _filled(_SUMS, 0.0)
        for half in range(2):
            own = numbers(builder, _load(builder, codes, _vector(_i8, LANES), LANES * half))
            sums = _plus_product(builder, sums, own, _load(builder, x, _SUMS, 4 * LANES * half))
        return sums

    return products


def _floats(exponent_bits: int) -> Callable[[ir.IRBuilder, ir.Value], ir.Value]:
    """8-bit floats, less a power of two: their bits go where float32 has sign, exponent and mantissa."""
    shift = 16 + exponent_bits
    mask = 0x80000000 | 0x7F << shift

    def numbers(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        wide = builder.shl(builder.sext(codes, _PAIRS), _filled(_PAIRS, shift))
        return builder.bitcast(builder.and_(wide, _filled(_PAIRS, mask)), _SUMS)

    return numbers


def _signed(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(codes, _PAIRS), _SUMS)


def _unsigned(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Integers without sign, less 128."""
    return _signed(builder, builder.xor(codes, _filled(codes.type, 0x80)))


def _plus_product(builder: ir.IRBuilder, sums: ir.Value, numbers: ir.Value, x: ir.Value) -> ir.Value:
    return builder.fadd(sums, builder.fmul(numbers, x, flags=_FAST), flags=_FAST)


half_bytes_by_fours, half_bytes_by_twos, half_bytes = (_row(_half_bytes, number) for number in (4, 2, 1))
e4m3, e5m2 = _row(_bytes(_floats(4))), _row(_bytes(_floats(5)))
int8, uint8 = _row(_bytes(_signed)), _row(_bytes(_unsigned))


@intrinsic
def add_rows_of_words(context, words, stride, x, table, num_blocks, sums):
    """Add `WORD_ROWS` rows of words, `stride` bytes apart, to 16 sums a block. A word has eight codes of one output; x
    has its numbers as pairs, of codes i and i + 4."""

    def generate(target, builder, signature, arguments):
        words, stride, x, table, num_blocks, sums = arguments
        table = _load(builder, table, _NUMBERS)
        pairs = [_splat(builder, _load(builder, x, _i32, 4 * pair)) for pair in range(4 * WORD_ROWS)]
        with cgutils.for_range(builder, num_blocks, intp=_i64) as loop:
            own, block = _next(builder, sums, loop.index, 64), _next(builder, words, loop.index, 64)
            total = _load(builder, own, _SUMS)
            for pair, token in enumerate(pairs):
                packed = _load(builder, _next(builder, block, _i64(pair // 4), stride), _NUMBERS)
                numbers = _looked_up(builder, table, packed, 4 * (pair % 4))
                total = _add_pairs(builder, total, numbers, builder.bitcast(token, _NUMBERS))
            _store(builder, total, own)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def add_rows_of_outputs(context, words, stride, x, table, num_blocks, sums):
    """Add `OUTPUT_ROWS` rows of words, `stride` bytes apart, to sums [8, W] float32: place i of word n is sum [i, n]. A
    block is of 16 words; x has `OUTPUT_ROWS` numbers."""

    def generate(target, builder, signature, arguments):
        words, stride, x, table, num_blocks, sums = arguments
        table = _load(builder, table, _NUMBERS)
        pairs = [_splat(builder, _load(builder, x, _i32, 4 * pair)) for pair in range(OUTPUT_ROWS // 2)]
        with cgutils.for_range(builder, num_blocks, intp=_i64) as loop:
            own, block = _next(builder, sums, loop.index, 64), _next(builder, words, loop.index, 64)
            places = [_next(builder, own, _i64(place), stride) for place in range(8)]
            totals = [_load(builder, place, _SUMS) for place in places]
            for pair, token in enumerate(pairs):
                rows = [_load(builder, _next(builder, block, _i64(2 * pair + row), stride), _PAIRS) for row in (0, 1)]
                for half, packed in enumerate(_interleaved(builder, *rows)):
                    for place in range(4):
                        numbers = _looked_up(builder, table, packed, 4 * place)
                        index, x_pair = 4 * half + place, builder.bitcast(token, _NUMBERS)
                        totals[index] = _add_pairs(builder, totals[index], numbers, x_pair)
            for total, place in zip(totals, places, strict=True):
                _store(builder, total, place)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _interleaved(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """The low halves of two rows of words side by side, and the high halves."""
    sixteen, low, high = (_filled(_PAIRS, value) for value in (16, 0xFFFF, 0xFFFF0000))
    lower = builder.or_(builder.and_(first, low), builder.shl(second, sixteen))
    upper = builder.or_(builder.lshr(first, sixteen), builder.and_(second, high))
    return [builder.bitcast(lower, _NUMBERS), builder.bitcast(upper, _NUMBERS)]


@intrinsic
def add_pairs_of_codes(context, words, offsets, rotations, x, table, num_pairs, sums):
    """Add pairs of codes in any order to `PANEL` sums. For each code `offsets` has where its words begin, int64 bytes
    from `words`, and `rotations` how far they turn, int32; x has its number."""

    def generate(target, builder, signature, arguments):
        words, offsets, rotations, x, table, num_pairs, sums = arguments
        table = _load(builder, table, _NUMBERS)
        addresses = [builder.add(sums, _i64(64 * block)) for block in range(PANEL // LANES)]
        totals = [cgutils.alloca_once_value(builder, _load(builder, address, _SUMS)) for address in addresses]
        with cgutils.for_range(builder, num_pairs, intp=_i64) as loop:
            token = _splat(builder, _load(builder, _next(builder, x, loop.index, 4), _i32))
            where, turn = _next(builder, offsets, loop.index, 16), _next(builder, rotations, loop.index, 8)
            rows = [builder.add(words, _load(builder, where, _i64, 8 * half)) for half in range(2)]
            turns = [_splat(builder, _load(builder, turn, _i32, 4 * half)) for half in range(2)]
            for block, total in enumerate(totals):
                halves = [_load(builder, row, _PAIRS, 64 * block) for row in rows]
                codes = _one_of_each(builder, halves, turns)
                numbers = _looked_up(builder, table, codes, 0)
                builder.store(
                    _add_pairs(builder, builder.load(total), numbers, builder.bitcast(token, _NUMBERS)), total
                )
        for total, address in zip(totals, addresses, strict=True):
            _store(builder, builder.load(total), address)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _one_of_each(builder: ir.IRBuilder, words: Sequence[ir.Value], turns: Sequence[ir.Value]) -> ir.Value:
    """The low halves of the first words beside the high halves of the second, each turned to the right."""
    turned = [
        _called(builder, "llvm.fshr.v16i32", _PAIRS, [own, own, turn]) for own, turn in zip(words, turns, strict=True)
    ]
    low, high = (
        builder.and_(own, _filled(_PAIRS, mask)) for own, mask in zip(turned, (0xFFFF, 0xFFFF0000), strict=True)
    )
    return builder.bitcast(builder.or_(low, high), _NUMBERS)

"""Rows of ggml's blocks times one token, in vectors. Importing this module imports numba.

With x in bfloat16, codes are multiplied in pairs. They are looked up in a table, or taken as 128 +
code, whose bits are the bits of the code behind a constant. An x in float16 is the sum of two
tokens in bfloat16. With x in float32, codes are converted. Both the excess of the codes and the
minima are subtracted by the `offsets` of a block [16], each for the scale in its place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    F32,
    I8,
    I16,
    I64,
    advanced,
    filled,
    load,
    splat,
    spread,
    vector,
)
from runtime.kernels.cpu.lanes import (
    AHEAD,
    HAS_PAIRS,
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    added_up,
    looked_up,
    pairs_added,
    plus_product,
    prefetch,
    switched,
)
from runtime.kernels.cpu.published.block_codes import (
    STEP,
    codes_2k,
    codes_3k,
    codes_4,
    codes_4_signed,
    codes_4k,
    codes_5_signed,
    codes_5k,
    codes_6k,
    codes_8,
    codes_e2m1,
    codes_iq4,
    codes_iq4_groups,
    exponents,
    half_exponents,
    halves,
    joined,
    of_blocks,
    scales_2,
    scales_3,
    scales_6,
    scales_iq4,
    scales_k,
    words_2k,
    words_3k,
    words_4k,
    words_5k,
    words_6k,
    words_iq4,
)
from runtime.kernels.cpu.published.byte_tokens import products_of_bytes
from runtime.kernels.cpu.published.grid_vectors import EIGHT, products_of_32
from runtime.kernels.cpu.published.published import (
    FLOATS_4,
    INTEGERS_4,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q5_0,
    Q5_K,
    Q6_K,
    Q8_0,
    TABLES,
)

_IQ4_TABLE = 2  # of TABLES, behind FLOATS_4 and INTEGERS_4
WHOLE_STEP = 264  # words of 16 bits: 256 numbers, their worth, and what makes it a multiple of 16
_CHAINS = 4  # of sums, so that none waits for another
_BITS_OF_128 = 0x4300  # as bfloat16, where a code of up to seven bits is the mantissa


class _Step(NamedTuple):
    """One iteration of the loop: its number, the addresses of a row's operands, and how many tokens
    in bfloat16 add up to x. The steps of these tokens alternate."""

    builder: ir.IRBuilder
    number: ir.Value
    codes: ir.Value
    x: ir.Value
    offsets: ir.Value
    num_tokens: int

    def own(self, operand: ir.Value, nbytes: int) -> ir.Value:
        """Return the address of this step's part of an operand that has `nbytes` bytes per step."""
        return advanced(self.builder, operand, self.number, nbytes)

    def blocks(self, nbytes: int) -> ir.Value:
        """Return the address of this step's blocks, of `nbytes`, and fetch those of a later step.
        The processor's own prefetcher stops at the end of a page."""
        own = self.own(self.codes, nbytes)
        for line in range(0, nbytes, 64):
            prefetch(self.builder, own, AHEAD + line)
        return own

    def add_products(self, sums: ir.Value, numbers: ir.Value, x: ir.Value, place: int) -> ir.Value:
        """Add the products of `numbers` with the numbers at `place`, in bytes, of each token at
        x."""
        step, place = divmod(place, 2 * STEP)
        for token in range(self.num_tokens):
            at = 2 * STEP * (self.num_tokens * step + token) + place
            sums = add_pairs(self.builder, sums, numbers, load(self.builder, x, NUMBERS, at))
        return sums


_Add = Callable[[_Step, list[ir.Value]], list[ir.Value]]
_Products = Iterator[tuple[ir.Value, ir.Value]]
"""Sums of products of codes with x, and the factors that these are multiplied by."""


class _Blocks(NamedTuple):
    """A type whose blocks have 256 codes. `lanes` has the place of the scale of each 16 codes;
    `factors_of` makes the factors of `offsets` from the scales, None without offsets. `less` is
    subtracted from the codes."""

    nbytes: int
    scales_of: Callable
    codes_of: Callable
    lanes: Sequence[int]
    factors_of: Callable | None
    less: int = 0


def _rows_of(adds: Mapping[int, _Add], num_tokens: int = 1) -> Callable[..., float]:
    """Return `dot(kind, codes, x, offsets, num_steps)`: a row of blocks of one of these kinds times
    x. `adds` make the sums after a step from the sums before it."""

    @intrinsic
    def dot(context, kind, codes, x, offsets, num_steps):
        def generate(target, builder, signature, arguments):
            kind, *operands, num_steps = arguments
            chains = [cgutils.alloca_once_value(builder, filled(SUMS, 0.0)) for _ in range(_CHAINS)]

            def write(add: _Add) -> None:
                for chain in chains:
                    builder.store(filled(SUMS, 0.0), chain)
                with cgutils.for_range(builder, num_steps, intp=I64) as loop:
                    step = _Step(builder, loop.index, *operands, num_tokens)
                    sums = add(step, [builder.load(chain) for chain in chains])
                    for own, chain in zip(sums, chains, strict=True):
                        builder.store(own, chain)

            switched(builder, kind, {number: partial(write, add) for number, add in adds.items()})
            total, *others = [builder.load(chain) for chain in chains]
            for other in others:
                total = builder.fadd(total, other)
            return added_up(builder, total)

        return types.float32(*[types.int64] * 5), generate

    return dot


def _four_blocks(start: int, scales_of: Callable, table: int) -> _Add:
    """Return the step over four blocks, each of 32 codes in 16 bytes behind a scale of `start`
    bytes. `table` is the number of the codes' table."""
    nbytes = start + 16

    def add(step: _Step, sums: list[ir.Value]) -> list[ir.Value]:
        builder = step.builder
        x = step.own(step.x, 2 * STEP * step.num_tokens)
        blocks = step.blocks(4 * nbytes)
        own = _looked_up_times(step, table, of_blocks(builder, blocks, start, nbytes), x)
        scales = _each(builder, scales_of(builder, blocks, nbytes, 4), range(4))
        return [*sums[1:], plus_product(builder, sums[0], own, scales)]

    return add


def _looked_up_times(
    step: _Step, table: int, words: ir.Value, x: ir.Value, place: int = 0
) -> ir.Value:
    """Return the products of the numbers of 128 codes in a table with the numbers from `place`, in
    bytes, of a token at x."""
    numbers = ir.Constant(NUMBERS, TABLES[table].tolist())
    own = filled(SUMS, 0.0)
    for i in range(4):
        own = step.add_products(
            own, looked_up(step.builder, numbers, words, 4 * i), x, place + 64 * i
        )
    return own


def _of_256(form: _Blocks, products_of: Callable[..., _Products]) -> _Add:
    """Return the step over a block of 256 codes."""

    def add(step: _Step, sums: list[ir.Value]) -> list[ir.Value]:
        builder = step.builder
        block = step.blocks(form.nbytes)
        scales = form.scales_of(builder, block)
        for own, factors in products_of(step, block, scales):
            sums = [*sums[1:], plus_product(builder, sums[0], own, factors)]
        if form.factors_of is None:
            return sums
        offsets = load(builder, step.own(step.offsets, 4 * LANES), SUMS)
        factors = form.factors_of(builder, scales)
        return [*sums[1:], plus_product(builder, sums[0], factors, offsets)]

    return add


def _groups_in_pairs(step: _Step, block: ir.Value, scales: ir.Value) -> _Products:
    """Yield the products of a block of IQ4_XS, four groups at a time."""
    x = step.own(step.x, 4 * STEP * step.num_tokens)
    for half in range(2):
        words = words_iq4(step.builder, block, half)
        own = _looked_up_times(step, _IQ4_TABLE, words, x, 2 * STEP * half)
        yield own, _each(step.builder, scales, range(4 * half, 4 * half + 4))


def _runs_in_pairs(words_of: Callable, step: _Step, block: ir.Value, scales: ir.Value) -> _Products:
    """Yield the products of a block of codes of two bits and more, both halves at once."""
    x = step.own(step.x, 4 * STEP * step.num_tokens)
    words = words_of(step.builder, block)
    for run in range(4):
        own = _with_128_times(step, words, (2 * run, 2 * run + 1), x)
        places = [2 * run, 2 * run + 1, 8 + 2 * run, 9 + 2 * run]
        yield own, _each(step.builder, scales, places)


def _halves_in_pairs(
    words_of: Callable,
    lanes: Sequence[Sequence[int]],
    step: _Step,
    block: ir.Value,
    scales: ir.Value,
) -> _Products:
    """Yield the products of a block. `lanes` has the places of the scales of the low and of the
    high codes of each half."""
    x = step.own(step.x, 4 * STEP * step.num_tokens)
    for half in range(2):
        words = words_of(step.builder, block, half)
        for part in range(2):  # low and high
            own = _with_128_times(step, words, (part, part + 2), x, 256 * half)
            yield own, _each(step.builder, scales, lanes[2 * half + part])


def _with_128_times(
    step: _Step, words: Sequence[ir.Value], numbers: Sequence[int], x: ir.Value, place: int = 0
) -> ir.Value:
    """Return the products of the codes in the words with these numbers, 128 too large, with the
    numbers from `place`, in bytes, of a token at x."""
    own = filled(SUMS, 0.0)
    for i in numbers:
        codes = step.builder.or_(words[i], filled(NUMBERS, _BITS_OF_128))
        own = step.add_products(own, codes, x, place + 64 * i)
    return own


def _floats_of_256(form: _Blocks, step: _Step, block: ir.Value, scales: ir.Value) -> _Products:
    """Yield the products of a block with x in float32, in the order of `quads`."""
    builder = step.builder
    x = step.own(step.x, 8 * STEP)
    codes = form.codes_of(builder, block)
    for run in range(4):
        words = builder.bitcast(joined(builder, codes[2 * run : 2 * run + 2]), PAIRS)
        own = _quads_times(builder, words, 8, advanced(builder, x, I64(run), 256), form.less)
        yield own, _each(builder, scales, form.lanes[4 * run : 4 * run + 4])


def _quads_times(
    builder: ir.IRBuilder, words: ir.Value, bits: int, x: ir.Value, less: int = 0
) -> ir.Value:
    """Return the products of 16 words, each of four codes of `bits` bits, with 64 numbers at x.

    A code is converted at its place in its word, which makes it larger by a power of two; the
    number in `quads` is smaller by as much, and the product has the bits of the code's own."""
    own = filled(SUMS, 0.0)
    for place in range(4):
        codes = builder.and_(words, filled(PAIRS, (1 << bits) - 1 << bits * place))
        if less:
            codes = builder.sub(codes, filled(PAIRS, less << bits * place))
        numbers = builder.sitofp(codes, SUMS)
        own = plus_product(builder, own, numbers, load(builder, x, SUMS, 64 * place))
    return own


def _sixty_four(step: _Step, sums: list[ir.Value]) -> list[ir.Value]:
    """Add a block of Q2_0, whose bytes have four codes each. `offsets` [blocks, 16] correct codes
    that are too large by one."""
    builder = step.builder
    block = step.blocks(18)
    words = builder.zext(load(builder, block, vector(I8, LANES), 2), PAIRS)
    own = load(builder, step.own(step.offsets, 4 * LANES), SUMS)
    own = builder.fadd(own, _quads_times(builder, words, 2, step.own(step.x, 2 * STEP)))
    scale = _each(builder, halves(builder, block, 18, 1), [0])
    return [*sums[1:], plus_product(builder, sums[0], own, scale)]


def _integers_of_256(form: _Blocks, step: _Step, block: ir.Value, scales: ir.Value) -> _Products:
    """Yield the products of a block with x in whole numbers of 16 bits: of each 32 those at even
    places first. Behind 256 of them is the worth of one, float32."""
    builder = step.builder
    x = step.own(step.x, 2 * WHOLE_STEP)
    own = filled(EIGHT, 0.0)
    for group, codes in enumerate(form.codes_of(builder, block)):
        total = _whole_products(builder, codes, advanced(builder, x, I64(group), 64), form.less)
        lanes = [form.lanes[2 * group + i // 4] for i in range(8)]
        own = plus_product(builder, own, total, spread(builder, scales, lanes))
    own = joined(builder, [own, filled(EIGHT, 0.0)])
    yield own, splat(builder, load(builder, x, F32, 512))


def _whole_products(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value, less: int) -> ir.Value:
    """Return the products of 32 codes, minus `less`, with whole numbers at x, float32 [8]."""
    words = builder.bitcast(codes, vector(I16, LANES))
    even = builder.and_(words, filled(words.type, 0xFF))
    odd = builder.lshr(words, filled(words.type, 8))
    products = [
        pairs_added(
            builder,
            builder.sub(part, filled(part.type, less)) if less else part,
            load(builder, x, part.type, place),
        )
        for part, place in ((even, 0), (odd, 32))
    ]
    return builder.sitofp(builder.add(*products), EIGHT)


def _whole(
    nbytes: int, scales_of: Callable, codes_of: Callable, *, products_of: Callable, count: int
) -> _Add:
    """Return the step over `count` blocks of 32 codes with x in whole numbers, which `products_of`
    multiplies, 64 bytes for each block. `offsets` has the worth of one in each block, float32."""

    def add(step: _Step, sums: list[ir.Value]) -> list[ir.Value]:
        builder = step.builder
        blocks = step.blocks(count * nbytes)
        x = step.own(step.x, 64 * count)
        worth = load(builder, step.own(step.offsets, 4 * count), vector(F32, count))
        scales = builder.fmul(scales_of(builder, blocks, nbytes, count), worth)
        for first in range(0, count, 2):
            two = range(first, min(first + 2, count))
            own = []
            for block in two:
                (codes,) = codes_of(builder, builder.add(blocks, I64(block * nbytes)))
                products = products_of(builder, codes, builder.add(x, I64(64 * block)))
                own.append(builder.sitofp(builder.add(*products), EIGHT))
            both = joined(builder, [*own, filled(EIGHT, 0.0)][:2])
            sums = [*sums[1:], plus_product(builder, sums[0], both, _each(builder, scales, two))]
        return sums

    return add


def _floats(
    nbytes: int, scales_of: Callable, codes_of: Callable, numbers_of: Callable, *, count: int
) -> _Add:
    """Return the step over `count` blocks of 32 codes with x in float32."""

    def add(step: _Step, sums: list[ir.Value]) -> list[ir.Value]:
        builder = step.builder
        blocks = step.blocks(count * nbytes)
        x = step.own(step.x, count * STEP)
        scales = scales_of(builder, blocks, nbytes, count)
        for block in range(count):
            (codes,) = codes_of(builder, builder.add(blocks, I64(block * nbytes)))
            own = filled(SUMS, 0.0)
            for half in range(2):
                x_half = load(builder, x, SUMS, block * STEP + 64 * half)
                own = plus_product(builder, own, numbers_of(builder, codes, half), x_half)
            sums = [*sums[1:], plus_product(builder, sums[0], own, _each(builder, scales, [block]))]
        return sums

    return add


def _scales(_: ir.IRBuilder, scales: ir.Value) -> ir.Value:
    return scales


def _minima(builder: ir.IRBuilder, scales: ir.Value) -> ir.Value:
    """Return the minima of Q2_K from its scales and minima [32]."""
    return spread(builder, scales, range(LANES, 2 * LANES))


def _minima_with_128(builder: ir.IRBuilder, scales: ir.Value) -> ir.Value:
    """Return the same, plus 128 times the scales, because codes in pairs are too large by 128."""
    own = spread(builder, scales, range(LANES))
    return plus_product(builder, _minima(builder, scales), own, filled(SUMS, 128.0))


def _each(builder: ir.IRBuilder, scales: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Return the scales at `lanes`, each repeated for the same number of sums."""
    return spread(builder, scales, [lanes[i * len(lanes) // LANES] for i in range(LANES)])


def _numbers(builder: ir.IRBuilder, codes: ir.Value, half: int, less: int = 0) -> ir.Value:
    """Return half of 32 signed bytes, minus `less`, as float32."""
    own = builder.sext(spread(builder, codes, range(LANES * half, LANES * (half + 1))), PAIRS)
    return builder.sitofp(builder.sub(own, filled(PAIRS, less)), SUMS)


def _e2m1(builder: ir.IRBuilder, codes: ir.Value, half: int) -> ir.Value:
    """Return half of 32 floats of 4 bits as float32: exponent and mantissa go where those of
    float32 meet."""
    own = builder.zext(spread(builder, codes, range(LANES * half, LANES * (half + 1))), PAIRS)
    sign = builder.shl(builder.and_(own, filled(PAIRS, 8)), filled(PAIRS, 28))
    magnitude = builder.shl(builder.and_(own, filled(PAIRS, 7)), filled(PAIRS, 22))
    return builder.fmul(builder.bitcast(builder.or_(sign, magnitude), SUMS), filled(SUMS, 2.0**126))


_OF_WORDS = (
    (0, 2),
    (1, 3),
    (8, 10),
    (9, 11),
)  # the scales of groups of 32 in `scales_k`, in the order of words
_BY_32 = [lane for lane in (0, 1, 2, 3, 8, 9, 10, 11) for _ in range(2)]
_BY_FOURS = [range(4 * i, 4 * i + 4) for i in range(4)]

_BLOCKS_OF_256 = {
    Q2_K: _Blocks(84, scales_2, codes_2k, range(LANES), _minima),
    Q3_K: _Blocks(110, scales_3, codes_3k, range(LANES), _scales),
    Q4_K: _Blocks(144, scales_k, codes_4k, _BY_32, _scales),
    Q5_K: _Blocks(176, scales_k, codes_5k, _BY_32, _scales),
    Q6_K: _Blocks(210, scales_6, codes_6k, range(LANES), _scales),
    IQ4_XS: _Blocks(136, scales_iq4, codes_iq4_groups, [i // 2 for i in range(LANES)], None, 128),
}
_IN_PAIRS = {
    Q2_K: partial(_runs_in_pairs, words_2k),
    Q3_K: partial(_runs_in_pairs, words_3k),
    Q4_K: partial(_halves_in_pairs, words_4k, _OF_WORDS),
    Q5_K: partial(_halves_in_pairs, words_5k, _OF_WORDS),
    Q6_K: partial(_halves_in_pairs, words_6k, _BY_FOURS),
    IQ4_XS: _groups_in_pairs,
}
_PAIRED_FORMS = _BLOCKS_OF_256 | {Q2_K: _BLOCKS_OF_256[Q2_K]._replace(factors_of=_minima_with_128)}
_FOURS_IN_PAIRS = {
    Q4_0: _four_blocks(2, halves, INTEGERS_4),
    IQ4_NL: _four_blocks(2, halves, _IQ4_TABLE),
    MXFP4: _four_blocks(1, exponents, FLOATS_4),
}
_IN_FLOATS = {
    Q8_0: partial(_floats, 34, halves, codes_8, _numbers),
    Q5_0: partial(_floats, 22, halves, codes_5_signed, _numbers),
    Q4_0: partial(_floats, 18, halves, partial(codes_4, start=2), partial(_numbers, less=8)),
    MXFP4: partial(_floats, 17, exponents, partial(codes_4, start=1), _e2m1),
    IQ4_NL: partial(_floats, 18, halves, codes_iq4, _numbers),
}
_IN_WHOLE = {
    Q8_0: partial(_whole, 34, halves, codes_8),
    Q5_0: partial(_whole, 22, halves, codes_5_signed),
    Q4_0: partial(_whole, 18, halves, codes_4_signed),
    IQ4_NL: partial(_whole, 18, halves, codes_iq4),
    MXFP4: partial(_whole, 17, half_exponents, codes_e2m1),
}
_256_IN_PAIRS = {kind: _of_256(form, _IN_PAIRS[kind]) for kind, form in _PAIRED_FORMS.items()}
# by what x is: bfloat16, float16 as two tokens in bfloat16, float32
_PAIRED, _PAIRED_256 = (_FOURS_IN_PAIRS, _256_IN_PAIRS) if HAS_PAIRS else ({}, {})
dot_fours = _rows_of(_PAIRED)
dot_fours_whole = _rows_of(
    {
        kind: form(products_of=products_of_32, count=4)
        for kind, form in _IN_WHOLE.items()
        if kind != Q8_0 and kind not in _PAIRED
    }
)
dot_fours_in_bytes, dot_one_in_bytes = (
    _rows_of(
        {kind: form(products_of=products_of_bytes, count=count) for kind, form in _IN_WHOLE.items()}
    )
    for count in (4, 1)
)
dot_fours_in_two = _rows_of(_PAIRED, 2)
dot_fours_wide = _rows_of({kind: form(count=4) for kind, form in _IN_FLOATS.items()})
dot_64 = _rows_of({Q2_0: _sixty_four})
dot_rest = _rows_of({kind: form(count=1) for kind, form in _IN_FLOATS.items()})
dot_256 = _rows_of(_PAIRED_256)
dot_256_in_two = _rows_of(_PAIRED_256, 2)
dot_256_wide, dot_256_whole = (
    _rows_of(
        {kind: _of_256(form, partial(products, form)) for kind, form in _BLOCKS_OF_256.items()}
    )
    for products in (_floats_of_256, _integers_of_256)
)

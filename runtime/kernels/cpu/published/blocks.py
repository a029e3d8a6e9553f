"""Matrices of ggml's blocks, which hold their scales inside, times one token. Importing this module
imports numba."""

import numpy as np

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import bits_of, part
from runtime.kernels.cpu.lanes import HAS_PAIRS
from runtime.kernels.cpu.published.block_codes import STEP
from runtime.kernels.cpu.published.block_vectors import (
    WHOLE_STEP,
    dot_64,
    dot_256,
    dot_256_in_two,
    dot_256_whole,
    dot_256_wide,
    dot_fours,
    dot_fours_in_bytes,
    dot_fours_in_two,
    dot_fours_whole,
    dot_fours_wide,
    dot_one_in_bytes,
    dot_rest,
)
from runtime.kernels.cpu.published.byte_tokens import round_block
from runtime.kernels.cpu.published.published import (
    BLOCK_NBYTES,
    CODES,
    IN_BYTES,
    IQ4_XS,
    KIND,
    MATRIX,
    MXFP4,
    Q2_K,
    Q3_K,
    Q5_0,
    Q6_K,
    Q8_0,
    beyond_bfloat16,
    f32,
    in_sixteen_bits,
    in_turns,
    u32,
)


def _in_words(low: tuple[int, ...], high: tuple[int, ...]) -> np.ndarray:
    """Return the order of the weights of a step by words.

    The low halves of a run of bytes hold the weights from a number of `low` on, the high halves the
    weights from a number of `high` on. The low byte of each word comes first."""
    starts = [(start, odd) for odd in (0, 1) for runs in (low, high) for start in runs]
    each = np.arange(0, STEP // len(low) // 2, 2)
    return np.concatenate([start + odd + each for start, odd in starts])


def _in_blocks(order: np.ndarray) -> np.ndarray:
    return np.concatenate([order, STEP + order])


_FOURS = _in_words((0, 32, 64, 96), (16, 48, 80, 112))  # the order of weights in `of_blocks`
# in blocks of 256: in Q2_K and Q3_K, in Q4_K and Q5_K, Q6_K, IQ4_XS
_RUNS, _GROUPS, _HALVES, _LOOKED_UP = range(4)
_ORDERS = np.stack(
    [
        np.concatenate(
            [
                32 * run + odd + np.r_[0:32:2, STEP : STEP + 32 : 2]
                for run in range(4)
                for odd in (0, 1)
            ]
        ),
        _in_blocks(_in_words((0, 64), (32, 96))),
        _in_blocks(_in_words((0, 32), (64, 96))),
        _in_blocks(_FOURS),
    ]
)


@part
def _in_steps(x, order):
    """Return x as bfloat16, each step of weights in this order."""
    token = np.empty(len(x) // len(order) * len(order), np.uint16)
    for start in range(0, len(token), len(order)):
        for i in range(len(order)):
            token[start + i] = np.uint16(bits_of(x[start + order[i]]) >> u32(16))
    return token


@part
def quads(x, bits):
    """Return x [I], float32, with the numbers of each 64 in the order of words of four codes: first
    those of the lowest codes of all words. Codes of `bits` bits stay at their places, and numbers
    are smaller by as much as this makes codes larger."""
    token = np.empty(len(x) // 64 * 64, np.float32)
    for start in range(0, len(token), 64):
        worth = f32(1)
        for place in range(4):
            for word in range(16):
                token[start + 16 * place + word] = x[start + 4 * word + place] * worth
            worth *= f32(0.5) ** bits
    return token


@part
def _whole(x):
    """Return x [I] in whole numbers of 16 bits and their worth, [blocks, WHOLE_STEP]."""
    worth = np.empty(len(x) // 256, np.float32)
    numbers = np.empty(len(x), np.int16)
    in_sixteen_bits(x, numbers, worth)
    token = np.empty((len(worth), WHOLE_STEP), np.int16)
    for block in range(len(worth)):
        for k in range(256):
            token[block, k // 32 * 32 + k % 2 * 16 + k % 32 // 2] = numbers[256 * block + k]
        bits = bits_of(worth[block])
        token[block, 256] = np.int16(bits & u32(0xFFFF))
        token[block, 257] = np.int16(bits >> u32(16))
    return token


@part
def _whole_by_32(x):
    """Return x [I] in whole numbers of 16 bits, and for each 32 the worth of one."""
    numbers = np.empty(len(x), np.int16)
    worth = np.empty(len(x) // 32, np.float32)
    in_sixteen_bits(x, numbers, worth)
    return numbers, worth


@part
def _order_of(kind):
    if kind in (Q2_K, Q3_K):
        return _RUNS
    if kind == Q6_K:
        return _HALVES
    return _LOOKED_UP if kind == IQ4_XS else _GROUPS


@part
def _excess_of(kind, is_narrow):
    """Return how much larger codes are than their numbers; 1 for Q2_K, whose scales and minima
    already include it."""
    if kind == Q2_K:
        return f32(1)
    own = f32(32) if kind == Q6_K else f32(4) if kind == Q3_K else f32(0)
    return own + f32(128) if is_narrow else own


@part
def _in_steps_of_two(x, order):
    """Return x, float16, as two tokens in bfloat16, whose steps alternate."""
    first = _in_steps(x, order)
    second = _in_steps(beyond_bfloat16(x), order)
    return in_turns(
        first.reshape(len(first) // STEP, STEP), second.reshape(len(second) // STEP, STEP)
    )


@part
def _offsets(x, kind, excess):
    """Return the offset that each scale of a block of 256 also multiplies, [blocks, 16].

    Offsets correct codes that are too large by `excess`. The minima of Q4_K and Q5_K, in the places
    4 to 7 and 12 to 15, belong to no code. IQ4_XS has no offsets."""
    out = np.empty((0 if kind == IQ4_XS else len(x) // 256, 16), np.float32)
    for block in range(len(out)):
        own = x[256 * block : 256 * (block + 1)]
        for group in range(8):
            if kind in (Q2_K, Q3_K, Q6_K):
                out[block, 2 * group] = -excess * own[32 * group : 32 * group + 16].sum()
                out[block, 2 * group + 1] = -excess * own[32 * group + 16 : 32 * group + 32].sum()
            else:
                place = group + group // 4 * 4
                total = own[32 * group : 32 * group + 32].sum()
                out[block, place] = -excess * total
                out[block, place + 4] = -total
    return out


@kernel(f"void({MATRIX})", nogil=True)
def multiply_blocks_of_256(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of Q2_K to Q6_K or IQ4_XS to y [O]. `is_narrow` says that x is in
    bfloat16, and is multiplied in pairs, or where the processor lacks these in whole numbers."""
    kind = fields[KIND]
    num_blocks = len(x) // 256
    is_paired = is_narrow and HAS_PAIRS
    is_whole = is_narrow and not HAS_PAIRS
    offsets = _offsets(x, kind, _excess_of(kind, is_paired))
    token = _in_steps(x if is_paired else x[:0], _ORDERS[_order_of(kind)])
    whole = _whole(x if is_whole else x[:0])
    wide = quads(x[:0] if is_narrow else x, 8)
    for row in range(len(y)):
        blocks = start + fields[CODES] + row * num_blocks * fields[BLOCK_NBYTES]
        if is_paired:
            y[row] += dot_256(kind, blocks, token.ctypes.data, offsets.ctypes.data, num_blocks)
        elif is_whole:
            y[row] += dot_256_whole(
                kind, blocks, whole.ctypes.data, offsets.ctypes.data, num_blocks
            )
        else:
            y[row] += dot_256_wide(kind, blocks, wide.ctypes.data, offsets.ctypes.data, num_blocks)


@kernel(f"void({MATRIX})", nogil=True)
def multiply_blocks_of_256_float16(fields, start, x, y, is_narrow):
    """Multiply like `multiply_blocks_of_256`, with x in float16."""
    kind = fields[KIND]
    num_blocks = len(x) // 256
    offsets = _offsets(x, kind, _excess_of(kind, True))
    token = _in_steps_of_two(x, _ORDERS[_order_of(kind)])
    for row in range(len(y)):
        blocks = start + fields[CODES] + row * num_blocks * fields[BLOCK_NBYTES]
        y[row] += dot_256_in_two(kind, blocks, token.ctypes.data, offsets.ctypes.data, num_blocks)


@kernel(f"void({MATRIX})", nogil=True)
def multiply_blocks_of_64(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of Q2_0 to y [O]."""
    kind = fields[KIND]
    token = quads(x, 2)
    num_blocks = len(token) // 64
    offsets = np.zeros((num_blocks, 16), np.float32)
    for block in range(num_blocks):
        for k in range(64):
            offsets[block, k // 4] -= x[64 * block + k]
    for row in range(len(y)):
        blocks = start + fields[CODES] + row * num_blocks * fields[BLOCK_NBYTES]
        y[row] += dot_64(kind, blocks, token.ctypes.data, offsets.ctypes.data, num_blocks)


@part
def nbytes_of(kind):
    """Return the number of bytes of a block of Q8_0, Q5_0, Q4_0, IQ4_NL or MXFP4."""
    if kind in (Q8_0, Q5_0):
        return 34 if kind == Q8_0 else 22
    return 17 if kind == MXFP4 else 18


@part
def _add_rest(kind, blocks, x, y):
    """Add to y [O] the products of the blocks of 32 behind a row's last four, with x in float32."""
    num_blocks = len(x) // 32
    first = num_blocks // 4 * 4
    nbytes = nbytes_of(kind)
    if first < num_blocks:
        rest = x[32 * first :].ctypes.data
        for row in range(len(y)):
            own = blocks + (row * num_blocks + first) * nbytes
            y[row] += dot_rest(kind, own, rest, 0, num_blocks - first)


@part
def _add_in_bytes(kind, blocks, x, y):
    """Add x [I], rounded to 8 bits, times a matrix of blocks of 32 to y [O]."""
    num_blocks = len(x) // 32
    token = np.empty(64 * num_blocks, np.int8)
    worth = np.empty(num_blocks, np.float32)
    first = num_blocks // 4 * 4
    nbytes = nbytes_of(kind)
    for block in range(num_blocks):
        own = x.ctypes.data + 128 * block
        round_block(own, token.ctypes.data + 64 * block, worth.ctypes.data + 4 * block)
    for row in range(len(y)):
        own = blocks + row * num_blocks * nbytes
        places = token.ctypes.data, worth.ctypes.data
        y[row] += dot_fours_in_bytes(kind, own, places[0], places[1], first // 4)
        if first < num_blocks:
            own += first * nbytes
            rest = places[0] + 64 * first, places[1] + 4 * first
            y[row] += dot_one_in_bytes(kind, own, rest[0], rest[1], num_blocks - first)


@kernel("void(int64, int64, float32[::1], float32[::1], boolean)", nogil=True)
def add_blocks_of_32(kind, blocks, x, y, is_narrow):
    """Add x [I] times a matrix of Q8_0, Q5_0, Q4_0, IQ4_NL or MXFP4, whose blocks are at this
    address, to y [O]. `is_narrow` says that x is in bfloat16; with `IN_BYTES` in its kind, x is
    rounded to 8 bits."""
    if kind >= IN_BYTES:
        _add_in_bytes(kind - IN_BYTES, blocks, x, y)
        return
    is_narrow = is_narrow and kind != Q8_0
    is_whole = is_narrow and (kind == Q5_0 or not HAS_PAIRS)
    row_nbytes = len(x) // 32 * nbytes_of(kind)
    num_steps = len(x) // STEP
    token = _in_steps(x[:0] if is_whole else x, _FOURS)
    whole, worth = _whole_by_32(x[: num_steps * STEP] if is_whole else x[:0])
    for row in range(len(y)):
        own = blocks + row * row_nbytes
        if is_whole:
            y[row] += dot_fours_whole(kind, own, whole.ctypes.data, worth.ctypes.data, num_steps)
        elif is_narrow:
            y[row] += dot_fours(kind, own, token.ctypes.data, 0, num_steps)
        else:
            y[row] += dot_fours_wide(kind, own, x.ctypes.data, 0, num_steps)
    _add_rest(kind, blocks, x, y)


@kernel(f"void({MATRIX})", nogil=True)
def multiply_blocks_of_32(fields, start, x, y, is_narrow):
    """Multiply like `add_blocks_of_32`, with the matrix described by `fields`."""
    add_blocks_of_32(fields[KIND], start + fields[CODES], x, y, is_narrow)


@kernel(f"void({MATRIX})", nogil=True)
def multiply_blocks_of_32_float16(fields, start, x, y, is_narrow):
    """Multiply like `multiply_blocks_of_32`, for Q4_0, IQ4_NL and MXFP4, with x in float16."""
    kind = fields[KIND]
    blocks = start + fields[CODES]
    row_nbytes = len(x) // 32 * nbytes_of(kind)
    token = _in_steps_of_two(x, _FOURS)
    for row in range(len(y)):
        y[row] += dot_fours_in_two(
            kind, blocks + row * row_nbytes, token.ctypes.data, 0, len(x) // STEP
        )
    _add_rest(kind, blocks, x, y)

"""Products with low-bit weights on a CPU, compiled by numba: streams of 1 to 8 bits are read in
place.

Outputs are adjacent, so that a vector of them is multiplied at once, by `streams` where the
processor can look up its codes, at 8 bits by `columns` where it multiplies bytes. Elsewhere code k
of every output is masked out of its word, multiplied by x[k] and added to its sum. The masked code
is not shifted down, so it counts a power of two too much; x is divided by that power beforehand,
which is exact. Importing this module imports numba.

Shapes: T tokens, I inputs, O outputs, G groups, W = ceil(I * bits / 32) words, Z = ceil(O * bits /
32) words.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from artifacts.common.numba_loops import kernel
from artifacts.quantisation.packing import Packed
from runtime.kernels.cpu.gated import LIKE, as_stored, rounded
from runtime.kernels.cpu.lanes import LANES
from runtime.kernels.cpu.published.columns import add_replica, can_add_replica, is_in_digits
from runtime.kernels.cpu.replicas.streams import NUM_FACTORS, can_look_up, look_up, part
from runtime.kernels.load import AS_NUMPY

# numba widens results that are not cast back
f32 = np.float32
i32 = np.int32
u32 = np.uint32
# words, scales, zeros, then the rest
_SIGNATURE = "void(int32[:, ::1], int16[:, ::1], int32[:, ::1], {})"
_BLOCK = 32  # codes that fill whole words, at every width
_NO_ZEROS = np.zeros((1, 1), np.int32)
_EXPONENTS = f32(2.0**112)  # by the difference of the exponent biases of float32 and float16


def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Multiply x [T, I] by the low-bit matrix: [T, O] in x's dtype, summed in float32. A token's
    sums do not depend on the other tokens."""
    y = np.zeros((len(x), packed.num_outputs), np.float32)
    tokens = np.ascontiguousarray((x.detach() if x.requires_grad else x).float().numpy())
    multiplier(packed.bits, is_narrow=x.dtype is torch.bfloat16)(*_arrays(packed), tokens, y)
    return torch.from_numpy(y).to(x.dtype)


def dequantise(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [O, I], outputs adjacent in memory: the bits of
    `kernels.low_bit.dequantise`, much faster."""
    out = torch.empty(packed.num_inputs, packed.num_outputs, dtype=dtype)
    _unpack(*_arrays(packed), packed.bits, out.view(AS_NUMPY[dtype]).numpy())
    return out.mT


def _arrays(packed: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    zeros = _NO_ZEROS if packed.qzeros is None else packed.qzeros.numpy()
    return packed.qweight.numpy(), packed.scales.numpy().view(np.int16), zeros


@part
def _code(word, following, shift, bits):
    """Read the code that begins at bit `shift` of `word` and may end in the following word; without
    a branch, so that loops vectorise."""
    low = u32(u32(word) >> u32(shift))
    high = u32(u32(u32(following) << u32(1)) << u32(31 - shift))
    return f32(i32(u32(low | high) & u32((1 << bits) - 1)))


@part
def _grid(scales, zeros, bits, scale, zero):
    """Write one group's scales (from float16 bits) and zero-points as floats [O]; at 1 bit the
    zero-point is 0.5."""
    patterns = scale.view(np.int32)
    for o in range(len(scales)):
        half = i32(scales[o])
        sign = i32(i32(half & i32(0x8000)) << i32(16))
        patterns[o] = i32(sign | i32(i32(half & i32(0x7FFF)) << i32(13)))
    for o in range(len(scales)):
        scale[o] *= _EXPONENTS
    if bits == 1:
        zero[:] = f32(0.5)
        return
    for o in range(u32(len(scales))):
        place = u32(u32(o) * u32(bits))
        i = u32(place >> u32(5))
        following = min(u32(i + u32(1)), u32(len(zeros) - 1))
        zero[o] = _code(zeros[i], zeros[following], u32(place & u32(31)), bits)


@part
def _add_code(words, bits, k, x, sums):
    """Add one input, one code at a time."""
    i = k * bits >> 5
    following = min(i + 1, len(words) - 1)
    for o in range(words.shape[1]):
        sums[o] += x * _code(words[i, o], words[following, o], k * bits & 31, bits)


@part
def _add_block(words, first, bits, x, sums):
    """Add a block of 32 codes of 1, 2, 4 or 8 bits; codes of both halves of each word are masked
    out."""
    half = 16 // bits
    mask = (1 << bits) - 1
    for j in range(bits):
        code = 2 * half * j
        for o in range(words.shape[1]):
            total = sums[o]
            low = words[first + j, o]
            high = i32(low >> i32(16))
            for i in range(half):
                total += x[code + i] * f32(i32(low & i32(mask << bits * i)))
            for i in range(half):
                total += x[code + half + i] * f32(i32(high & i32(mask << bits * i)))
            sums[o] = total


@part
def _add_three(words, first, x, sums):
    """Add a block of 32 codes of 3 bits in 3 words: two codes span two words, and one includes a
    sign bit."""
    for o in range(words.shape[1]):
        total = sums[o]
        a = words[first, o]
        b = words[first + 1, o]
        c = words[first + 2, o]
        for i in range(10):
            total += x[i] * f32(i32(a & i32(7 << 3 * i)))
        for i in range(10):
            total += x[11 + i] * f32(i32(b & i32(7 << 3 * i + 1)))
        for i in range(9):
            total += x[22 + i] * f32(i32(c & i32(7 << 3 * i + 2)))
        total += x[10] * _code(a, b, 30, 3)
        total += x[21] * _code(b, c, 31, 3)
        total += x[31] * _code(c, c, 29, 3)
        sums[o] = total


def code_worth(bits: int) -> np.ndarray:
    """Return the factor [32] of x for each code of a block: the inverse of the masked code's power
    of two."""
    places = np.arange(_BLOCK) * bits
    shifts = np.where(places % 32 > 28, 0, places % 32) if bits == 3 else places % 16
    return (2.0**-shifts).astype(np.float32)


@part
def _mask_out(words, first, bits, worth, x, scaled, sums):
    """Add a block of 32 codes; `scaled` [32] is overwritten."""
    for i in range(_BLOCK):
        scaled[i] = x[i] * worth[i]
    if bits == 3:
        _add_three(words, first, scaled, sums)
    else:
        _add_block(words, first, bits, scaled, sums)


@part
def product(words, scales, zeros, bits, worth, is_fast, x, y):
    """Add x [T, I] times the weights to y [T, O]; `worth` [32] is `code_worth(bits)`, `is_fast`
    says that codes can be looked up, the arrays are `multiplier`'s."""
    num_outputs = words.shape[1]
    group_size = x.shape[1] // len(scales)
    scale = np.empty(num_outputs, np.float32)
    zero = np.empty(num_outputs, np.float32)
    sums = np.empty(num_outputs, np.float32)
    factors = np.empty(NUM_FACTORS, np.float32)
    for g in range(len(scales)):
        _grid(scales[g], zeros[min(g, len(zeros) - 1)], bits, scale, zero)
        begin = g * group_size
        end = (g + 1) * group_size
        first = min((begin + _BLOCK - 1) // _BLOCK * _BLOCK, end)
        last = max(end // _BLOCK * _BLOCK, first)
        for t in range(len(x)):
            sums[:] = 0
            for k in range(begin, first):
                _add_code(words, bits, k, x[t, k], sums)
            for start in range(first, last, _BLOCK):
                row = start * bits // 32
                own = x[t, start : start + _BLOCK]
                if is_fast and num_outputs % LANES == 0:
                    look_up(words[row:], bits, own, factors, sums)
                else:
                    _mask_out(words, row, bits, worth, own, factors, sums)
            for k in range(last, end):
                _add_code(words, bits, k, x[t, k], sums)
            total_x = x[t, begin:end].sum()
            for o in range(num_outputs):
                y[t, o] += scale[o] * (sums[o] - zero[o] * total_x)


@part
def product_in_digits(words, scales, zeros, bits, worth, x, y):
    """Multiply like `product`, in whole numbers if groups allow it."""
    if can_add_replica(x.shape[1] // len(scales)):
        add_replica(words, scales, zeros, bits, x, y)
    else:
        product(words, scales, zeros, bits, worth, False, x, y)


@cache
def multiplier(bits: int, *, is_narrow: bool) -> Callable[..., None]:
    """Return `multiply(words, scales, zeros, x, y)` for one width: it adds x [T, I] times the
    weights to y [T, O]. `is_narrow` says that x is in bfloat16.

    x and y are float32, `words` int32 [W, O], `scales` float16 as int16 [G, O], `zeros` int32 [G,
    Z], unused at 1 bit.
    """
    worth = code_worth(bits)
    is_fast = can_look_up(bits, is_narrow=is_narrow)
    has_digits = is_in_digits(bits, is_narrow=is_narrow)

    @kernel(_SIGNATURE.format("float32[:, ::1], float32[:, ::1]"), nogil=True)
    def multiply(words, scales, zeros, x, y):
        if has_digits:
            product_in_digits(words, scales, zeros, bits, worth, x, y)
        else:
            product(words, scales, zeros, bits, worth, is_fast, x, y)

    return multiply


@part
def _unpack_row(words, bits, k, scale, zero, row):
    """Write the weights of one input, [O]."""
    i = k * bits >> 5
    shift = k * bits & 31
    following = min(i + 1, len(words) - 1)
    if shift + bits > 32:
        for o in range(len(row)):
            row[o] = scale[o] * (_code(words[i, o], words[following, o], shift, bits) - zero[o])
    else:
        for o in range(len(row)):
            row[o] = scale[o] * (_code(words[i, o], 0, shift, bits) - zero[o])


@kernel([_SIGNATURE.format(f"int64, {like.replace('::1', ':, ::1')}") for like in LIKE], nogil=True)
def _unpack(words, scales, zeros, bits, out):
    """Write every weight, out [I, O]. Numbers of 16 bits are rounded here: torch's rounding alone
    takes longer."""
    scale = np.empty(words.shape[1], np.float32)
    zero = np.empty(words.shape[1], np.float32)
    row = np.empty(words.shape[1], np.float32)
    group_size = len(out) // len(scales)
    for k in range(len(out)):
        group = k // group_size
        if k % group_size == 0:
            _grid(scales[group], zeros[min(group, len(zeros) - 1)], bits, scale, zero)
        _unpack_row(words, bits, k, scale, zero, row)
        for o in range(len(row)):
            out[k, o] = as_stored(rounded(row[o], out), out)

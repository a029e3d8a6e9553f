"""Device functions that several Triton kernels share. Importing this module imports triton."""

import triton
import triton.language as tl


@triton.jit
def number_of(pair, numbers_ptr, first, second, third, fourth, are_packed: tl.constexpr):
    """The number of a pair's expert, -1 for none: from memory, or from the kernel's own arguments
    (`runtime.kernels.gpu.addressing.RankNumbers`)."""
    if are_packed:
        word = tl.where(pair < 4, first, tl.where(pair < 8, second, tl.where(pair < 12, third, fourth)))
        number = ((word >> (pair % 4 * 15)) & 32767).to(tl.int32)
        number = tl.where(number == 32767, -1, number)
    else:
        number = tl.load(numbers_ptr + pair)
    return number


@triton.jit
def expert_start(starts_ptr, number, border: tl.constexpr = 16):
    """Where an expert begins, in elements of its arena: a multiple of `border`, which the compiler cannot see in a
    number that it loads. Without this every thread would load single elements. Slots begin on borders of 64 bytes."""
    return tl.multiple_of(tl.load(starts_ptr + number), border)


@triton.jit
def load_block(places, is_row, is_column):
    """Load the elements at the pointers `places` [R, C]: zero where the row or the column is out of range."""
    return tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0.0)


@triton.jit
def swiglu(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 inputs, rounded to `dtype` where the module rounds."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype)


@triton.jit
def clamped_swiglu(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """gpt-oss's activation of float32 inputs, rounded to `dtype` where the module rounds."""
    gate = tl.minimum(gate.to(dtype).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -limit), limit)
    sigmoid = (1.0 / (1.0 + tl.exp(-(gate * alpha).to(dtype).to(tl.float32)))).to(dtype).to(tl.float32)
    return ((up + 1.0).to(dtype).to(tl.float32) * (gate * sigmoid).to(dtype).to(tl.float32)).to(dtype)

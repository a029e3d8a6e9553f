"""Device functions that several Triton kernels share. Importing this module imports triton."""

import triton
import triton.language as tl


@triton.jit
def number_of(pair, numbers_ptr, first, second, third, fourth, are_packed: tl.constexpr):
    """Return the number of a pair's expert, -1 for none: from memory, or from the kernel's own
    arguments (`runtime.kernels.gpu.addressing.RankNumbers`)."""
    if are_packed:
        word = tl.where(
            pair < 4, first, tl.where(pair < 8, second, tl.where(pair < 12, third, fourth))
        )
        number = ((word >> (pair % 4 * 15)) & 32767).to(tl.int32)
        number = tl.where(number == 32767, -1, number)
    else:
        number = tl.load(numbers_ptr + pair)
    return number


@triton.jit
def expert_start(starts_ptr, number, border: tl.constexpr = 16):
    """Return the beginning of an expert, in elements of its arena.

    It is a multiple of `border`, which the compiler cannot see in a number that it loads; unless
    told, every thread would load single elements. Slots begin on borders of 64 bytes."""
    return tl.multiple_of(tl.load(starts_ptr + number), border)


@triton.jit
def load_block(places, is_row, is_column):
    """Load the elements at the pointers `places` [R, C]: zero where the row or the column is out of
    range."""
    return tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0.0)


@triton.jit
def with_bias(y, bias_ptr, places, is_there, dtype: tl.constexpr):
    """Return a product y [.., N], float32, rounded where the module rounds it, plus its bias at
    `places` [N]."""
    bias = tl.load(bias_ptr + places, mask=is_there, other=0.0).to(tl.float32)
    return y.to(dtype).to(tl.float32) + bias


@triton.jit
def activated(gate, up, own: tl.constexpr, dtype: tl.constexpr):
    """Return the activation of float32 products by `own`, a
    `runtime.kernels.gates.Gate`, rounded to `dtype` where the module rounds."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if own.limit is not None:
        gate = tl.minimum(gate, own.limit).to(dtype).to(tl.float32)
        up = tl.minimum(tl.maximum(up, -own.limit), own.limit).to(dtype).to(tl.float32)
    if own.rule == "scaled":
        sigmoid = _sigmoid((gate * own.alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        acts = gate * sigmoid
        up = (up + 1.0).to(dtype).to(tl.float32)
    elif own.rule == "silu":
        acts = gate / (1.0 + tl.exp(-gate))
    elif own.rule == "gelu":
        acts = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif own.rule == "gelu_tanh":  # 1 + tanh(z) is twice the sigmoid of 2 z
        acts = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(own.rule == "relu2")
        acts = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    if own.has_up:
        acts = acts.to(dtype).to(tl.float32) * up
    return acts.to(dtype)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))

"""Triton kernels for low-bit weights: one multiplies directly from the packed stream, one
dequantises it.

Codes are multiplied as integers; scale and zero-point are applied once per group and output: `sum_k
x_k s (q_k - z) = s (sum_k x_k q_k - z sum_k x_k)`. tools.gpu.check times the kernels. Importing
this module imports triton, which is optional.
"""

import torch
import triton
import triton.language as tl

from artifacts.quantisation.packing import Packed
from runtime.kernels.gpu.blocks import load_block

MOST_TOKENS = 16  # the rows of one tile of a tensor core's product
_OUTPUTS = 64  # of one program
_INPUTS = 64  # of one step
_PROGRAMS = 1024  # at least, if there are enough groups, so that every multiprocessor has several


def multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Multiply x [t, in], t at most MOST_TOKENS, by the low-bit matrix: [t, out] in x's dtype,
    summed in float32.

    Programs share the groups, and their sums are added in a fixed order: equal inputs give equal
    bits.
    """
    count = len(x)
    num_outputs = packed.num_outputs
    num_groups = len(packed.scales)
    assert count <= MOST_TOKENS, count
    num_blocks = triton.cdiv(num_outputs, _OUTPUTS)
    groups_each = triton.cdiv(num_groups, min(num_groups, triton.cdiv(_PROGRAMS, num_blocks)))
    shares = torch.empty(triton.cdiv(num_groups, groups_each), count, num_outputs, device=x.device)
    if count:
        _multiply[(num_blocks, len(shares))](
            x.contiguous(), packed.qweight,
            packed.scales if packed.qzeros is None else packed.qzeros, packed.scales,
            shares, count, packed.num_inputs, num_outputs, num_groups, len(packed.qweight) - 1,
            0 if packed.qzeros is None else packed.qzeros.shape[1], groups_each, packed.group_size,
            bits=packed.bits, num_rows=1 if count == 1 else MOST_TOKENS, block_outputs=_OUTPUTS,
            block_inputs=_INPUTS,
            # Exact for 16-bit x as well: neither it nor a code has more digits than TF32.
            precision="ieee" if x.dtype is torch.float32 else "tf32",
            num_stages=2,  # more would not fit into the shared memory of older GPUs
        )  # fmt: skip
    return shares.sum(0).to(x.dtype)


def dequantise(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [out, in] with its outputs adjacent in memory; one pass, without
    intermediate tensors."""
    out = torch.empty(
        packed.num_inputs, packed.num_outputs, dtype=dtype, device=packed.qweight.device
    )
    _unpack[(triton.cdiv(packed.num_outputs, _OUTPUTS), triton.cdiv(packed.num_inputs, _INPUTS))](
        packed.qweight, packed.scales if packed.qzeros is None else packed.qzeros, packed.scales,
        out,
        packed.num_inputs, packed.num_outputs, len(packed.qweight) - 1,
        0 if packed.qzeros is None else packed.qzeros.shape[1], packed.group_size,
        bits=packed.bits, block_outputs=_OUTPUTS, block_inputs=_INPUTS,
    )  # fmt: skip
    return out.mT


@triton.jit
def read_codes(words, row, last_row, stride, columns, shift, in_range, bits: tl.constexpr):
    """Read the codes that begin at bit `shift` of each word; at 3 bits some end in the next
    word."""
    low = tl.load(words + row * stride + columns, mask=in_range, other=0).to(
        tl.uint32, bitcast=True
    )
    codes = low >> shift.to(tl.uint32)
    if bits == 3:
        following = tl.minimum(row + 1, last_row)
        high = tl.load(words + following * stride + columns, mask=in_range, other=0).to(
            tl.uint32, bitcast=True
        )
        codes = codes | ((high << 1) << (31 - shift).to(tl.uint32))
    return (codes & ((1 << bits) - 1)).to(tl.int32)


@triton.jit
def _group_sums(
    x_ptr, words_ptr, count, outputs, group, num_inputs, num_outputs, group_size, last_word,
    bits: tl.constexpr, num_rows: tl.constexpr, block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Sum one group of inputs: x times the bare codes [num_rows, block_outputs], and x itself
    [num_rows]."""
    is_token = tl.arange(0, num_rows) < count
    is_output = outputs < num_outputs
    x_rows = x_ptr + tl.arange(0, num_rows)[:, None] * num_inputs
    products = tl.zeros((num_rows, block_outputs), tl.float32)
    sum_x = tl.zeros((num_rows,), tl.float32)
    end = (group + 1) * group_size
    for first in range(group * group_size, end, block_inputs):
        inputs = first + tl.arange(0, block_inputs)
        is_input = inputs < end
        x = load_block(x_rows + inputs[None, :], is_token, is_input).to(tl.float32)
        starts = inputs[:, None] * bits
        columns = outputs[None, :]
        in_range = is_input[:, None] & is_output[None, :]
        codes = read_codes(
            words_ptr, starts >> 5, last_word, num_outputs, columns, starts & 31, in_range, bits
        )
        codes = codes.to(tl.float32)
        sum_x += tl.sum(x, axis=1)
        if num_rows == 1:
            products += tl.sum(tl.trans(x) * codes, axis=0)[None, :]
        else:
            products += tl.dot(x, codes, input_precision=precision)
    return products, sum_x


@triton.jit
def product(
    x_ptr, count, outputs, first_group, last_group, streams, sizes,
    bits: tl.constexpr, num_rows: tl.constexpr, block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Multiply x [count, I] by some outputs of a low-bit matrix, over some groups of its inputs:
    float32 [num_rows, block_outputs]. `streams` are pointers to its words, zero-points and scales;
    `sizes` are as unpacked here."""
    words_ptr, zeros_ptr, scales_ptr = streams
    num_inputs, num_outputs, group_size, last_word, zero_words = sizes
    is_output = outputs < num_outputs
    total = tl.zeros((num_rows, block_outputs), tl.float32)
    for group in range(first_group, last_group):
        products, sum_x = _group_sums(
            x_ptr, words_ptr, count, outputs, group, num_inputs, num_outputs, group_size, last_word,
            bits, num_rows, block_outputs, block_inputs, precision,
        )  # fmt: skip
        scale = tl.load(scales_ptr + group * num_outputs + outputs, mask=is_output, other=0.0).to(
            tl.float32
        )
        if bits == 1:
            total += scale[None, :] * (products - 0.5 * sum_x[:, None])
        else:
            group_ptr = zeros_ptr + group * zero_words
            places = outputs * bits
            zeros = read_codes(
                group_ptr, places >> 5, zero_words - 1, 1, 0, places & 31, is_output, bits
            )
            total += scale[None, :] * (products - zeros.to(tl.float32)[None, :] * sum_x[:, None])
    return total


@triton.jit
def _multiply(
    x_ptr, words_ptr, zeros_ptr, scales_ptr, shares_ptr,
    count, num_inputs, num_outputs, num_groups, last_word, zero_words, groups_each, group_size,
    bits: tl.constexpr, num_rows: tl.constexpr, block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Multiply by one block of outputs and one share of the groups: shares [share, T, O]."""
    share = tl.program_id(1)
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    first_group = share * groups_each
    last_group = tl.minimum((share + 1) * groups_each, num_groups)
    streams = (words_ptr, zeros_ptr, scales_ptr)
    sizes = (num_inputs, num_outputs, group_size, last_word, zero_words)
    total = product(
        x_ptr, count, outputs, first_group, last_group, streams, sizes,
        bits, num_rows, block_outputs, block_inputs, precision,
    )  # fmt: skip
    tokens = tl.arange(0, num_rows)
    places = shares_ptr + (share * count + tokens[:, None]) * num_outputs + outputs[None, :]
    tl.store(places, total, mask=(tokens[:, None] < count) & (outputs < num_outputs)[None, :])


@triton.jit
def _unpack(
    words_ptr, zeros_ptr, scales_ptr, out_ptr, num_inputs, num_outputs, last_word, zero_words,
    group_size,
    bits: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """Dequantise one block of weights, out [I, O]."""
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)[None, :]
    inputs = tl.program_id(1) * block_inputs + tl.arange(0, block_inputs)[:, None]
    in_range = (inputs < num_inputs) & (outputs < num_outputs)
    groups = inputs // group_size
    starts = inputs * bits
    codes = read_codes(
        words_ptr, starts >> 5, last_word, num_outputs, outputs, starts & 31, in_range, bits
    ).to(tl.float32)
    scale = tl.load(scales_ptr + groups * num_outputs + outputs, mask=in_range, other=0.0).to(
        tl.float32
    )
    if bits == 1:
        weights = scale * (codes - 0.5)
    else:
        first = groups * zero_words
        places = outputs * bits
        last = first + zero_words - 1
        zeros = read_codes(
            zeros_ptr, first + (places >> 5), last, 1, 0, places & 31, in_range, bits
        )
        weights = scale * (codes - zeros.to(tl.float32))
    tl.store(
        out_ptr + inputs * num_outputs + outputs,
        weights.to(out_ptr.dtype.element_ty),
        mask=in_range,
    )

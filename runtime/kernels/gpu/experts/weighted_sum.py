"""Weighted sum of a token's experts in ascending order: a Triton kernel of its own, or the end of
the last kernel that computes experts. Importing this module imports triton.

At the end of a kernel that sums up, every program counts itself for its columns once its outputs
are written; the last one to do so adds up the outputs of all pairs there. The count is an atomic
addition. It releases everything that all threads of a program wrote before a barrier, and acquires
what the others released (as in `threadFenceReduction` of CUDA's samples).
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.blocks import load_block
from runtime.kernels.gpu.total import Total

# of one program that only adds up
_OUTPUTS = 256
_TOKENS = 8


def operands(total: Total | None) -> tuple[tuple[torch.Tensor | None, ...], dict[str, object]]:
    """Return the operands of a kernel that ends with `sum_last`: four pointers, and its
    constants."""
    if total is None:
        return (None,) * 4, {"sums": False, "is_wide": False, "width": 1}
    width = triton.next_power_of_2(total.keys.shape[1])
    return (total.keys, total.weights, total.out, total.done), {
        "sums": True,
        "is_wide": total.is_wide,
        "width": width,
    }


def combine(
    y: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    is_wide: bool = False,
) -> None:
    """Write out [T, H]: y [T * K, H] times `weights` [T, K], summed by ascending `keys` [T, K]; a
    negative key is no expert. Every share and sum is rounded to out's type, or, if `is_wide`, only
    the whole sum."""
    num_tokens, top_k = keys.shape
    hidden = out.shape[1]
    tokens = min(triton.next_power_of_2(num_tokens), _TOKENS)
    _combine[(triton.cdiv(hidden, _OUTPUTS), triton.cdiv(num_tokens, tokens))](
        y, keys, weights, out, num_tokens, hidden, top_k,
        is_wide=is_wide, width=triton.next_power_of_2(top_k), block_tokens=tokens, block=_OUTPUTS,
    )  # fmt: skip


@triton.jit
def sum_last(
    y_ptr, keys_ptr, weights_ptr, out_ptr, done_ptr, hidden, top_k,
    is_wide: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """End a program of a grid [columns, T * K] that writes `block` outputs of a pair to y: the last
    of a token's K programs adds them up."""
    token = tl.program_id(1) // top_k
    own_ptr = done_ptr + token * tl.num_programs(0) + tl.program_id(0)
    # all threads of this program have stored their outputs before its count is released
    tl.debug_barrier()
    num_before = tl.atomic_add(own_ptr, 1, sem="acq_rel", scope="gpu")
    if num_before == top_k - 1:
        tl.debug_barrier()
        tl.store(own_ptr, 0)
        tokens = tl.zeros((1,), tl.int32) + token
        columns = tl.program_id(0) * block + tl.arange(0, block)
        _add_up(
            y_ptr,
            keys_ptr,
            weights_ptr,
            out_ptr,
            tokens,
            token + 1,
            columns,
            hidden,
            top_k,
            is_wide,
            width,
            1,
            block,
        )


@triton.jit
def _combine(
    y_ptr, keys_ptr, weights_ptr, out_ptr, num_tokens, hidden, top_k,
    is_wide: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    columns = tl.program_id(0) * block + tl.arange(0, block)
    _add_up(
        y_ptr, keys_ptr, weights_ptr, out_ptr, tokens, num_tokens, columns, hidden, top_k,
        is_wide, width, block_tokens, block,
    )  # fmt: skip


@triton.jit
def _add_up(
    y_ptr, keys_ptr, weights_ptr, out_ptr, tokens, num_tokens, columns, hidden, top_k,
    is_wide: tl.constexpr, width: tl.constexpr, block_tokens: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sum some outputs of some tokens, one expert after another, as the module does."""
    is_token = tokens < num_tokens
    is_column = columns < hidden
    ranks = tl.arange(0, width)
    pairs = tokens[:, None] * top_k + ranks[None, :]
    keys = tl.load(keys_ptr + pairs, mask=is_token[:, None] & (ranks < top_k)[None, :], other=-1)
    places = _places(keys, ranks)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    sums: tl.constexpr = tl.float32 if is_wide else dtype
    total = tl.zeros((block_tokens, block), tl.float32)
    for place in range(top_k):
        number = tl.sum(tl.where(places == place, pairs + 1, 0), axis=1)  # 0: no expert is left
        has_expert = number > 0
        pair = number - 1
        # a long prompt has more outputs than 32 bits count
        y_rows = y_ptr + pair.to(tl.int64) * hidden
        y = load_block(y_rows[:, None] + columns[None, :], has_expert, is_column)
        weight = tl.load(weights_ptr + pair, mask=has_expert, other=0.0).to(tl.float32)
        share = (y.to(dtype).to(tl.float32) * weight[:, None]).to(sums).to(tl.float32)
        total = (total + share).to(sums).to(tl.float32)
    out_rows = out_ptr + tokens.to(tl.int64) * hidden
    tl.store(
        out_rows[:, None] + columns[None, :],
        total.to(dtype),
        mask=is_token[:, None] & is_column[None, :],
    )


@triton.jit
def _places(keys, ranks):
    """Return each rank's place [T, K] in its token's sum, by ascending keys, then ranks; -1 for a
    negative key."""
    is_used = keys >= 0
    is_tied = (keys[:, None, :] == keys[:, :, None]) & (ranks[None, None, :] < ranks[None, :, None])
    is_earlier = ((keys[:, None, :] < keys[:, :, None]) | is_tied) & is_used[:, None, :]
    return tl.where(is_used, tl.sum(is_earlier.to(tl.int32), axis=2), -1)

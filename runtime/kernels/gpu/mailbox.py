"""A Triton kernel that writes a token's ids and numbers straight into page-locked memory of the host, and then a number
that says so. It has not run on a GPU yet. Importing this module imports triton."""

from functools import cache

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.repeated import Repeated, width


def send(ids: torch.Tensor, values: torch.Tensor, words: torch.Tensor, number: int) -> None:
    """Write ids [K] and `values` [V] to `words`, int32 [1 + K + V] that a GPU can reach: from place 1 on the ids, then
    the bits of the values as float32; and at last `number` to place 0."""
    _letter(ids.numel(), values.numel())((ids, values, words), (number,))


@cache
def _letter(num_ids: int, num_values: int) -> Repeated:
    return Repeated(_send, (1,), (num_ids, num_values), block=width(max(num_ids, num_values)), num_warps=1)


@triton.jit(do_not_specialize=["number"])  # else the first letter and every sixteenth would be compiled apart
def _send(ids_ptr, values_ptr, words_ptr, number, num_ids, num_values, block: tl.constexpr):
    places = tl.arange(0, block)
    ids = tl.load(ids_ptr + places, mask=places < num_ids, other=0).to(tl.int32)
    values = tl.load(values_ptr + places, mask=places < num_values, other=0.0).to(tl.float32)
    tl.store(words_ptr + 1 + places, ids, mask=places < num_ids)
    tl.store(words_ptr + 1 + num_ids + places, values.to(tl.int32, bitcast=True), mask=places < num_values)
    tl.debug_barrier()  # all threads have written; what one of them releases then, the host sees after all of it
    tl.atomic_xchg(words_ptr, number, sem="release", scope="sys")

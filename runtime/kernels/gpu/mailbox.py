"""A Triton kernel that writes a token's ids and numbers straight into page-locked memory of the host, and then a number
that says so. It has not run on a GPU yet. Importing this module imports triton."""

import torch
import triton
import triton.language as tl


def send(ids: torch.Tensor, values: torch.Tensor, words: torch.Tensor, number: int) -> None:
    """Write ids [K] and `values` [V] to `words`, int32 [1 + K + V] that a GPU can reach: from place 1 on the ids, then
    the bits of the values as float32; and at last `number` to place 0."""
    block = triton.next_power_of_2(max(ids.numel(), values.numel()))
    _send[(1,)](ids, values, words, ids.numel(), values.numel(), number, block=block, num_warps=1)


@triton.jit(do_not_specialize=["number"])  # else the first letter and every sixteenth would be compiled apart
def _send(ids_ptr, values_ptr, words_ptr, num_ids, num_values, number, block: tl.constexpr):
    places = tl.arange(0, block)
    ids = tl.load(ids_ptr + places, mask=places < num_ids, other=0).to(tl.int32)
    values = tl.load(values_ptr + places, mask=places < num_values, other=0.0).to(tl.float32)
    tl.store(words_ptr + 1 + places, ids, mask=places < num_ids)
    tl.store(words_ptr + 1 + num_ids + places, values.to(tl.int32, bitcast=True), mask=places < num_values)
    tl.debug_barrier()  # all threads have written; what one of them releases then, the host sees after all of it
    tl.atomic_xchg(words_ptr, number, sem="release", scope="sys")

"""Triton kernels that write a token's ids and numbers straight into page-locked memory of the host,
and then a number that marks them as complete. Importing this module imports triton."""

from functools import cache

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.repeated import Repeated, width

MOST = tl.constexpr((1 << 30) - 1)  # letters before their numbers begin anew


def send(ids: torch.Tensor, values: torch.Tensor, words: torch.Tensor, number: int) -> None:
    """Write ids [K] and `values` [V] to `words`, int32 [1 + K + V] that a GPU can reach.

    The ids go to place 1 and the following places, then the bits of the values as float32, and last
    `number` to place 0."""
    _letter(ids.numel(), values.numel())((ids, values, words), (number,))


def send_next(values: torch.Tensor, number: torch.Tensor, words: torch.Tensor, count: int) -> None:
    """Increase `number`, int32 [1], by one, and write `values`, int32 [V], and then the number as
    letter `number` modulo `count` of `words`, int32 [count * (1 + V)]. Letters begin with their
    number."""
    _next_letter(values.numel(), count)((values, number, words))


@cache
def _next_letter(num_values: int, count: int) -> Repeated:
    return Repeated(_send_next, (1,), (num_values, count), block=width(num_values), num_warps=1)


@cache
def _letter(num_ids: int, num_values: int) -> Repeated:
    return Repeated(
        _send, (1,), (num_ids, num_values), block=width(max(num_ids, num_values)), num_warps=1
    )


# else the first letter and every sixteenth would be compiled apart
@triton.jit(do_not_specialize=["number"])
def _send(ids_ptr, values_ptr, words_ptr, number, num_ids, num_values, block: tl.constexpr):
    places = tl.arange(0, block)
    ids = tl.load(ids_ptr + places, mask=places < num_ids, other=0).to(tl.int32)
    values = tl.load(values_ptr + places, mask=places < num_values, other=0.0).to(tl.float32)
    tl.store(words_ptr + 1 + places, ids, mask=places < num_ids)
    tl.store(
        words_ptr + 1 + num_ids + places,
        values.to(tl.int32, bitcast=True),
        mask=places < num_values,
    )
    # all threads have written; what one of them releases then, the host sees after all of it
    tl.debug_barrier()
    tl.atomic_xchg(words_ptr, number, sem="release", scope="sys")


@triton.jit
def _send_next(values_ptr, number_ptr, words_ptr, num_values, count, block: tl.constexpr):
    number = tl.load(number_ptr) % MOST + 1
    tl.debug_barrier()  # all threads have read it
    places = tl.arange(0, block)
    values = tl.load(values_ptr + places, mask=places < num_values, other=0)
    letter_ptr = words_ptr + (number % count) * (1 + num_values)
    tl.store(letter_ptr + 1 + places, values, mask=places < num_values)
    tl.store(number_ptr, number)
    tl.debug_barrier()  # all have written, as in `_send`
    tl.atomic_xchg(letter_ptr, number, sem="release", scope="sys")

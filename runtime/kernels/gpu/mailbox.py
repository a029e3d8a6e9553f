"""Triton kernels that exchange letters with the host through page-locked memory. A letter to the
host is a token's ids and numbers, and then a number that marks them as complete. For an answer, or
for copies, a kernel waits until a number has come. Importing this module imports triton.

A kernel that waits keeps one warp busy and nothing else. It ends early where the host says so, and
where nothing comes within a time limit: then it says so to the host, and computes with what is
there, so that no graph hangs.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from runtime.kernels.gpu.repeated import Repeated, blocks, width

MOST = tl.constexpr((1 << 30) - 1)  # letters before their numbers begin anew
NUMBERS = 1 << 15
"""Numbers for which a kernel waits before they begin anew: a number has come if one less than half
as many behind it has."""
_LAST = tl.constexpr(NUMBERS - 1)
_HALF = tl.constexpr(NUMBERS // 2)
_MOST_WAITED_NS = tl.constexpr(60_000_000_000)
_PATIENT_NS = tl.constexpr(1_000_000)  # so long no wait asks whether it is to end early
_VALUES = 1024  # of one program that copies


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


def show(values: torch.Tensor, there: torch.Tensor) -> None:
    """Copy `values` to the host's memory `there`, of the same size and dtype. The host may read
    them once it has a letter that is sent behind."""
    _shown(values.numel())((values, there))


def receive(answer: torch.Tensor, out: torch.Tensor, stopped: torch.Tensor, *, layer: int) -> None:
    """Wait until the host has written 1 to the first place of `answer`, int32 [1 + W]; then copy
    the other places to `out`, int32 [W], and clear the first. The wait ends early once `stopped`,
    int32 [1] of the host, is not 0; where it takes too long, 1 + `layer` is written there."""
    _answer(out.numel())((answer, out, stopped), (layer,))


def arrive(
    wanted: torch.Tensor,
    told: torch.Tensor,
    stopped: torch.Tensor,
    *,
    layer: int,
    near: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    y: torch.Tensor,
) -> None:
    """Wait for copies, and for outputs that the host computes.

    `told`, int32 [L + 1], ends with the number that copies have written last. The wait is for the
    first number of `wanted`, int32 [2 + K], -1 for none, and its nanoseconds go to `told[layer]`.
    With `near` (the host's number, int32 [1], and its outputs [K, H]) the wait is also for the
    second number of `wanted`, by each rank whose row among the outputs, in the other K places, is
    not -1; the row then goes to the rank's row of y, float32 [K, H]. Waits end early as in
    `receive`.
    """
    top_k, hidden = y.shape
    given = (None, None) if near is None else near
    launch = _arrival(told.numel() - 1, top_k, hidden, near is not None)
    launch((wanted, told, stopped, *given, y), (layer,))


@cache
def _shown(count: int) -> Repeated:
    return Repeated(_show, (blocks(count, _VALUES),), (count,), block=_VALUES)


@cache
def _answer(num_words: int) -> Repeated:
    return Repeated(_receive, (1,), (num_words,), block=width(num_words), num_warps=1)


@cache
def _arrival(num_layers: int, top_k: int, hidden: int, has_near: bool) -> Repeated:
    return Repeated(
        _arrive, (top_k if has_near else 1,), (num_layers, hidden), has_near=has_near, block=_VALUES
    )


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


@triton.jit
def _acquired(number_ptr):
    """Return a number that the host or a copy writes. What was written before it is seen after."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];",
        "=r,l",
        [number_ptr],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait(number_ptr, wanted, stopped_ptr, layer):
    """Wait for the number `wanted` or one behind it. Return the nanoseconds that this took."""
    begun_ns = globaltimer()
    waited_ns = begun_ns - begun_ns
    is_late = (((_acquired(number_ptr) - wanted) & _LAST) >= _HALF).to(tl.int32)
    while is_late > 0:
        is_late = (((_acquired(number_ptr) - wanted) & _LAST) >= _HALF).to(tl.int32)
        waited_ns = globaltimer() - begun_ns
        # not at every turn: it is a second number of the host, and most waits are short
        if waited_ns > _PATIENT_NS:
            if _acquired(stopped_ptr) != 0:
                is_late = is_late * 0
            elif (waited_ns > _MOST_WAITED_NS) & (is_late > 0):
                tl.store(stopped_ptr, layer + 1)
                is_late = is_late * 0
    return waited_ns


@triton.jit
def _show(values_ptr, there_ptr, count, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(
        there_ptr + places, tl.load(values_ptr + places, mask=places < count), mask=places < count
    )


@triton.jit(do_not_specialize=["layer"])
def _receive(answer_ptr, out_ptr, stopped_ptr, layer, num_words, block: tl.constexpr):
    _wait(answer_ptr, 1, stopped_ptr, layer)
    tl.debug_barrier()
    places = tl.arange(0, block)
    # volatile: it may not be read before the number
    words = tl.load(answer_ptr + 1 + places, mask=places < num_words, other=0, volatile=True)
    tl.store(out_ptr + places, words, mask=places < num_words)
    tl.debug_barrier()  # all threads have read it
    # the host writes the next answer once it has a letter that is sent behind this
    tl.store(answer_ptr, 0)


@triton.jit(do_not_specialize=["layer"])
def _arrive(
    wanted_ptr, told_ptr, stopped_ptr, number_ptr, outputs_ptr, y_ptr, layer, num_layers, hidden,
    has_near: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Each program serves one rank; the first waits for copies, too."""
    rank = tl.program_id(0)
    if rank == 0:
        copied = tl.load(wanted_ptr)
        if copied >= 0:
            waited_ns = _wait(told_ptr + num_layers, copied, stopped_ptr, layer)
            tl.store(told_ptr + layer, tl.minimum(waited_ns, 2147483647).to(tl.int32))
        else:
            tl.store(told_ptr + layer, 0)
    if has_near:
        row = tl.load(wanted_ptr + 2 + rank)
        if row >= 0:
            _wait(number_ptr, tl.load(wanted_ptr + 1), stopped_ptr, layer)
            tl.debug_barrier()
            for first in range(0, hidden, block):
                places = first + tl.arange(0, block)
                outputs = tl.load(
                    outputs_ptr + row * hidden + places, mask=places < hidden, volatile=True
                )
                tl.store(
                    y_ptr + rank * hidden + places, outputs.to(tl.float32), mask=places < hidden
                )

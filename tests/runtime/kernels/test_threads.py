"""Parts of a token's work run side by side, end before the caller goes on, and give errors to
it."""

import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from runtime.kernels.cpu import threads as module
from runtime.kernels.cpu.dense import CompiledLinear
from runtime.kernels.cpu.threads import MIN_SHARE, KernelThreads, divided
from tests.runtime.kernels.test_dense import Holder


@pytest.fixture
def three() -> Iterator[KernelThreads]:
    three = KernelThreads(3)
    yield three
    three.close()


def fails(text: str) -> None:
    raise ValueError(text)


def test_parts_run_side_by_side_the_first_on_the_callers_thread(three: KernelThreads) -> None:
    together = threading.Barrier(3)
    names = [""] * 3

    def part(number: int) -> None:
        together.wait(10)  # fails unless all three are under way
        names[number] = threading.current_thread().name

    assert three.num_used == 1
    three.run([partial(part, number) for number in range(3)])
    assert names[0] == threading.current_thread().name
    assert all(name.startswith("moectl-kernels") for name in names[1:]) and names[1] != names[2]
    assert three.num_used == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_reaches_the_caller_once_the_other_parts_have_ended(
    three: KernelThreads, failing: int
) -> None:
    may_end = threading.Event()
    ended = []

    def slow() -> None:
        may_end.wait(10)
        ended.append(True)

    threading.Timer(0.05, may_end.set).start()
    parts = [slow, slow, slow]
    parts[failing] = partial(fails, "a kernel's")
    with pytest.raises(ValueError, match="a kernel's"):
        three.run(parts)
    assert len(ended) == 2
    three.run([lambda: None] * 3)


def test_threads_that_slept_or_were_woken_do_their_part(three: KernelThreads) -> None:
    done: list[int] = []
    for pause_s in (0, 0.01):
        three.run([partial(done.append, number) for number in range(3)])
        time.sleep(pause_s)
        three.wake()
        time.sleep(pause_s)
    three.run([partial(done.append, number) for number in range(2)])
    assert sorted(done) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    threads = KernelThreads(3)
    assert threading.active_count() == before, "none before there is work"
    threads.run([lambda: None] * 3)
    assert threading.active_count() > before
    for _ in range(2):
        threads.close()
    assert threading.active_count() == before


def test_a_fork_has_threads_of_its_own(three: KernelThreads) -> None:
    done = []
    three.run([partial(done.append, number) for number in range(3)])
    child = os.fork()
    if not child:
        three.run([partial(done.append, number) for number in range(3)])
        os._exit(0 if len(done) == 6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("nbytes", "num_shares"), [(1, 1), (2 * MIN_SHARE - 1, 1), (2 * MIN_SHARE, 2), (1 << 40, 3)]
)
def test_little_work_is_not_divided(three: KernelThreads, nbytes: int, num_shares: int) -> None:
    assert three.num_shares(nbytes) == num_shares


@pytest.mark.parametrize(
    ("nbytes", "num_shares", "shares"),
    [
        ([4, 4, 4, 4], 2, [[0, 2], [1, 3]]),
        ([1, 8, 2, 4], 2, [[1], [3, 2, 0]]),
        ([5, 5], 3, [[0], [1]]),
        ([7], 2, [[0]]),
        ([], 2, []),
    ],
)
def test_pieces_are_divided_by_their_bytes(
    nbytes: list[int], num_shares: int, shares: list[list[int]]
) -> None:
    assert divided(nbytes, num_shares) == shares


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_a_linear_layer_has_the_same_bits_on_any_number_of_threads(
    bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_SHARE", 1)
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    torch.manual_seed(0)
    layer = nn.Linear(200, 131, bias=bias).to(dtype)
    x = torch.randn(1, 1, 200).to(dtype)
    outputs = []
    for count in (1, 2, 3):
        threads = KernelThreads(count)
        CompiledLinear(Holder(layer), threads).install()
        outputs.append(layer(x))
        threads.close()
        assert threads.num_used == count
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])

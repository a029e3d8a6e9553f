"""Kernels that wait for the host, by triton's interpreter, with a clock of the test."""

import pytest

from tests.helpers.triton_process import compiled, compiler, interpret, needs_triton

pytestmark = needs_triton
WAITING = """
import pytest, torch
from tests.helpers import recorded_graphs
from runtime.kernels.gpu import mailbox
recorded_graphs.install(pytest.MonkeyPatch())
now, turn_ns = [0], [21_000_000_000]

def clock():
    now[0] += turn_ns[0]
    return now[0]

recorded_graphs.clock_ns = clock
words = lambda *values: torch.tensor(values, dtype=torch.int32)
stopped, out = words(0), words(0, 0, 0)
answer = words(1, 7, -1, 9)
mailbox.receive(answer, out, stopped, layer=4)
print(answer.tolist(), out.tolist(), stopped.item())
# nothing comes for a minute
mailbox.receive(answer, out, stopped, layer=4)
print(stopped.item(), now[0] > 60e9)
# the next ones end at once
now[0], turn_ns[0] = 0, 700_000
mailbox.receive(answer, out, stopped, layer=5)
print(stopped.item(), now[0] < 4e6)
turn_ns[0] = 21_000_000_000

def arrived(landed, wanted, number=0, rows=(-1, -1)):
    now[0] = 0
    stopped, told, y = words(0), words(5, 5, landed), torch.zeros(2, 3)
    near = words(3), torch.arange(6.0).view(2, 3) + 1
    mailbox.arrive(words(wanted, number, *rows), told, stopped, layer=1, near=near, y=y)
    waits = words(wanted, 0, -1, -1)
    mailbox.arrive(waits, told, stopped, layer=0, y=y)
    return stopped.item(), told[:2].tolist() != [5, 5], y.tolist()

print(arrived(9, 8), arrived(0, mailbox.NUMBERS - 1), arrived(9, -1))
print(arrived(7, 8)[0], arrived(0, -1, number=4, rows=(0, -1))[0])
print(arrived(0, -1, number=3, rows=(1, 0))[2], arrived(0, -1, number=2, rows=(-1, 0))[2])
"""


def test_a_kernel_waits_for_its_number_and_no_longer_than_a_minute() -> None:
    """Numbers begin anew; an answer is cleared once it is read; only ranks with a row take the
    host's outputs."""
    zeros = "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]"
    there = f"(0, True, {zeros})"
    assert interpret(WAITING) == [
        "[0, 7, -1, 9] [7, -1, 9] 0",
        "5 True",
        "5 True",
        f"{there} {there} {there}",
        "2 2",
        "[[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]] [[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]",
    ]


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_what_was_written_before_a_number_is_read_after_it(tmp_path, capability: int) -> None:
    from runtime.kernels.gpu.mailbox import _arrive, _receive

    words = dict.fromkeys(("answer_ptr", "out_ptr", "wanted_ptr", "told_ptr"), "*i32")
    words |= {"stopped_ptr": "*i32", "number_ptr": "*i32"}
    others = {"outputs_ptr": "*bf16", "y_ptr": "*fp32"}
    with compiler(tmp_path):
        received = compiled(_receive, capability, words, block=64, odd=("layer", "num_words"))
        arrived = compiled(
            _arrive, capability, words | others, block=1024, has_near=True, odd=("layer",)
        )
    for code in (received, arrived):
        ptx = code["ptx"]
        assert ptx.index("ld.acquire.sys.global") < ptx.index("ld.volatile.global")

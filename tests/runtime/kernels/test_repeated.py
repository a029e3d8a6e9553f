"""A kernel's later launches skip what its first one looked up, and pass the same arguments."""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from runtime.kernels.gpu import repeated
from runtime.kernels.gpu.repeated import Kept, Repeated, blocks, width
from tests.helpers.triton_process import needs_triton


class Kernel:
    """Compiles itself for each launch, and says who launched what."""

    arg_names = ("x_ptr", "y_ptr", "word", "size", "is_wide", "block")

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.told = []
        self.is_interpreted = is_interpreted

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.told.append(("first", grid, *arguments, constants))
            return None if self.is_interpreted else Compiled(self.told)

        return launch


class Compiled:
    function = "function"
    packed_metadata = "metadata"

    def __init__(self, told: list) -> None:
        self.told = told

    def run(self, x: int, y: int, z: int, *arguments: object) -> None:
        self.told.append(("again", (x, y, z), *arguments))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Triton's driver says."""
    says = SimpleNamespace(
        get_current_device=lambda: 2, get_current_stream=lambda device: ("stream", device)
    )
    monkeypatch.setattr(repeated, "_driver", lambda: says)
    return says


def launches(
    kernel: Kernel, *tensors: torch.Tensor, kept: Sequence[Kept] = (Kept(None),)
) -> list[str]:
    repeated = Repeated(kernel, (3,), (7,), block=16, is_wide=False, num_warps=1)
    for word, one in enumerate(tensors):
        repeated((one,), (word,), kept[word % len(kept)])
    return [who for who, *_ in kernel.told]


def test_later_launches_pass_the_same_arguments_in_the_order_of_the_parameters() -> None:
    """Behind the stream and what was compiled; there are no hooks to tell of them."""
    kernel = Kernel()
    x = torch.zeros(4)
    other = torch.ones(4)
    assert launches(kernel, x, other) == ["first", "again"]
    assert kernel.told[0] == (
        "first",
        (3, 1, 1),
        x,
        None,
        0,
        7,
        {"block": 16, "is_wide": False, "num_warps": 1},
    )
    assert kernel.told[1][:8] == (
        "again",
        (3, 1, 1),
        ("stream", 2),
        "function",
        "metadata",
        None,
        None,
        None,
    )
    assert kernel.told[1][8:10] == (other, None) and kernel.told[1][10:] == (1, 7, False, 16)


def test_another_type_or_border_is_looked_up_anew() -> None:
    x = torch.zeros(8)
    told = launches(Kernel(), x, x[1:], x[1:5], x.double(), x)
    assert told == ["first", "first", "again", "first", "again"]


def test_each_device_compiles_its_own(driver: SimpleNamespace) -> None:
    devices = iter((0, 1, 1, 0))  # asked once a launch, but at a first one before and behind it
    driver.get_current_device = lambda: next(devices)
    assert launches(Kernel(), torch.zeros(2), torch.zeros(2), torch.zeros(2)) == [
        "first",
        "first",
        "again",
    ]


def test_what_is_kept_is_looked_at_too() -> None:
    x = torch.zeros(8)
    kept = [Kept(x), Kept(None), Kept(x[1:]), Kept(torch.ones(8)), Kept(x.int())]
    assert launches(Kernel(), *5 * [x], kept=kept) == ["first", "first", "first", "again", "first"]


def test_the_interpreter_is_asked_each_time() -> None:
    assert launches(Kernel(is_interpreted=True), torch.zeros(2), torch.zeros(2)) == [
        "first",
        "first",
    ]


@needs_triton
def test_kernels_have_tensors_first_and_constants_last() -> None:
    from runtime.kernels.gpu import decide, mailbox
    from runtime.kernels.gpu.experts import gated

    for kernel in (gated._inner, gated._down, mailbox._send, decide._resolve, decide._fill):
        parameters = inspect.signature(kernel.fn).parameters
        are_tensors = [name.endswith("_ptr") for name in parameters]
        are_constants = [str(one.annotation).endswith("constexpr") for one in parameters.values()]
        assert are_tensors == sorted(are_tensors, reverse=True) and are_constants == sorted(
            are_constants
        ), kernel


@pytest.mark.parametrize(
    ("count", "size", "power"), [(1, 1, 1), (8, 3, 8), (9, 3, 16), (64, 22, 64)]
)
def test_sizes_without_triton(count: int, size: int, power: int) -> None:
    assert (blocks(count, 3), width(count)) == (size, power)

"""A driver for Triton without a GPU: kernels are compiled and launched by Triton's own code, and
then nothing runs, but for the kernels that send a token's ids, or counters, to the host."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from runtime import devices
from runtime.backends import host_copy


class NullDriver:
    """Counts launches; `own_s` is the time that it took itself to do what a GPU would have done."""

    def __init__(self, *, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.num_launches = 0
        self.own_s = 0.0
        self.utils = self

    def activate(self) -> None:
        """Make Triton launch by this driver."""
        driver.set_active(self)

    # What Triton asks of a driver

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, src, metadata):
        """Return the function that launches a kernel."""
        names = src.fn.arg_names
        sends = _SENDS.get(src.fn.__name__)

        def send(arguments: tuple) -> None:
            begin_s = time.thread_time()
            sends(**dict(zip(names, arguments, strict=True)))
            self.own_s += time.thread_time() - begin_s

        def launch(x, y, z, stream, function, packed, metadata, enter, leave, *arguments) -> None:
            self.num_launches += 1
            if sends:
                (NullGraph.under_way.sends.append if NullGraph.under_way else _do)(
                    partial(send, arguments)
                )

        return launch


class NullGraph:
    """Stand-in for `torch.cuda.CUDAGraph`: a replay sends the letters that were captured, each when
    the host waits for it, and does nothing else."""

    under_way: "NullGraph | None" = None
    to_send: ClassVar[deque[Callable[[], None]]] = deque()
    made: ClassVar[list["NullGraph"]] = []

    def __init__(self) -> None:
        self.sends: list[Callable[[], None]] = []
        self.made.append(self)

    @classmethod
    def activate(cls) -> None:
        """Have sessions capture tokens so; `counted_gpu` has the streams."""
        torch.cuda.CUDAGraph = cls
        torch.cuda.graph_pool_handle = lambda: (0, 1)
        devices.has_graphs = lambda device: True
        wait = host_copy.wait_for

        def send_and_wait(letter: np.ndarray, number: int, *others: object) -> None:
            while cls.to_send and letter[0] != number:
                cls.to_send.popleft()()
            wait(letter, number, *others)

        host_copy.wait_for = send_and_wait

    @classmethod
    def letters(cls) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the ids [1, K] and the values [1, V] that graphs send of routers."""
        for graph in cls.made:
            for send in graph.sends:
                ((first, second, *_),) = send.args
                if first.dtype == torch.int64:
                    yield first, second

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        NullGraph.under_way = self

    def capture_end(self) -> None:
        NullGraph.under_way = None

    def replay(self) -> None:
        self.to_send += self.sends


def _do(work: Callable[[], None]) -> None:
    work()


def _send(
    ids_ptr: torch.Tensor,
    values_ptr: torch.Tensor,
    words_ptr: torch.Tensor,
    number: int,
    **_: object,
) -> None:
    ids = ids_ptr.flatten().int()
    values = values_ptr.flatten().float().view(torch.int32)
    words_ptr[1 : 1 + len(ids) + len(values)] = torch.cat([ids, values])
    words_ptr[0] = number


def _send_next(
    values_ptr: torch.Tensor,
    number_ptr: torch.Tensor,
    words_ptr: torch.Tensor,
    count: int,
    **_: object,
) -> None:
    number_ptr += 1
    letter = words_ptr.view(count, -1)[number_ptr.item() % count]
    letter[1:] = values_ptr.flatten()
    letter[0] = number_ptr


_SENDS = {"_send": _send, "_send_next": _send_next}  # kernels of `runtime.kernels.gpu.mailbox`

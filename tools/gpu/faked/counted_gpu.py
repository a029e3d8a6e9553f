"""A session as on a GPU, without one: kernels by triton's interpreter, streams that do everything
at once, and counts of what a driver would be asked. Import it under the interpreter only."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton.runtime.interpreter import GridExecutor

from runtime.backends import host_copy
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.backends.triton import triton_backend
from runtime.links.cuda import CudaLink
from runtime.links.cuda_flags import FlaggedCopies
from runtime.session.session import Session
from runtime.tiers import open as tiers

counts: Counter[str] = Counter()


class Stream:
    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_event(self, event: "Event") -> None:
        counts["event calls"] += 1

    def wait_stream(self, stream: "Stream") -> None: ...

    def synchronize(self) -> None:
        counts["host waits"] += 1

    def query(self) -> bool:
        return True


class Event:
    """Event that has ended only once the host has waited for it or for one recorded later: the case
    that makes the most work."""

    recorded = ended = 0

    def __init__(self, enable_timing: bool = False) -> None:
        counts["events made"] += 1
        self.number = 0

    def record(self, stream: Stream | None = None) -> None:
        counts["event calls"] += 1
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.ended

    def synchronize(self) -> None:
        counts["host waits"] += threading.current_thread() is threading.main_thread()
        Event.ended = max(Event.ended, self.number)

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


_STREAM = Stream()


@contextmanager
def _entered(stream: Stream) -> Iterator[None]:
    yield


def install() -> None:
    """Make sessions of this process use the GPU's code."""
    torch.cuda.Stream = Stream
    torch.cuda.Event = Event
    torch.cuda.stream = _entered
    torch.cuda.current_stream = lambda device=None: _STREAM
    CpuBackend.suits = staticmethod(lambda opened, **_: False)
    triton_backend._runs_on = lambda device: True
    host_copy.has_streams = lambda device: True
    tiers._open_link = lambda opened, choice, slow, device: CudaLink(
        slow, opened.shape, device=device, slot_nbytes=opened.store.layout.nbytes, is_pinned=True
    )
    _count(GridExecutor, "__call__", "launches")
    _count(host_copy, "wait_for", "host waits")
    _count(triton_backend.TritonBackend, "_to_device", "small copies")
    _count(CudaLink, "_hand_over", "copies of experts")
    _count(FlaggedCopies, "_queue_number", "flags")


def with_mailbox(session: Session) -> Session:
    session.watcher._to_host._mailbox = host_copy.Mailbox(torch.device("cpu"))
    return session


def _count(owner: object, name: str, what: str) -> None:
    work = getattr(owner, name)

    def counted(*arguments: object, **named: object) -> object:
        counts[what] += 1
        return work(*arguments, **named)

    setattr(owner, name, counted)

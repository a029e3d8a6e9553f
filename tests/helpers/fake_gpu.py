"""A stand-in for `torch.cuda` that runs copies and compute in a random order, as late as events
permit.

Work queued on a stream is kept and runs later. A read that sees another expert than the promised
one is what would be a race on a GPU.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from artifacts.shape import Shape
from runtime.links import cuda

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=64)
PIECE = 16  # bytes of a prefetch that are handed over at a time: a quarter of an expert


class Gpu:
    """Any number of streams; `run` runs queued work in random order until `until` holds or nothing
    can run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.current = threading.local()
        self.compute = Stream(self)
        self.time_ms = 0.0
        self.num_copied = 0  # bytes whose copy was queued
        self.num_events = 0  # that were made

    def current_stream(self, device: object = None) -> "Stream":
        return getattr(self.current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before = self.current_stream()
        self.current.stream = stream
        yield
        self.current.stream = before

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        with self.lock:
            while not until():
                ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
                if not ready:
                    return
                self.time_ms += 1
                self.random.choice(ready).queue.popleft()[1]()


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue = deque()
        gpu.streams.append(self)

    def add(self, work: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        with self.gpu.lock:
            self.queue.append((ready, work))

    def wait_event(self, event: "Event") -> None:
        mark = event.mark
        self.add(lambda: None, lambda: mark in event.passed)

    def wait_stream(self, stream: "Stream") -> None:
        event = Event(self.gpu)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.run(lambda: not self.queue)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        gpu.num_events += 1
        self.gpu = gpu
        self.mark = 0
        self.passed = {0}
        self.time_ms = 0.0

    def record(self, stream: Stream) -> None:
        self.mark += 1
        stream.add(lambda mark=self.mark: self._pass(mark))

    def _pass(self, mark: int) -> None:
        self.passed.add(mark)
        self.time_ms = self.gpu.time_ms

    def query(self) -> bool:
        return self.mark in self.passed

    def synchronize(self) -> None:
        self.gpu.run(self.query)
        assert self.query(), "no queued work leads to this event: a deadlock"

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query()
        return other.time_ms - self.time_ms


class Memory:
    """The bytes of an expert on host or device: its key. Copies read the host when they run, not
    when queued."""

    def __init__(
        self, gpu: Gpu, *, pinned: bool = False, of: "Memory | None" = None, part: slice = slice(64)
    ) -> None:
        self.gpu = gpu
        self.pinned = pinned
        self._whole = of or self
        self._places = range(*part.indices(64))
        if of is None:
            self.bytes = [-1] * 64

    @property
    def nbytes(self) -> int:
        return len(self._places)

    @property
    def key(self) -> int:
        """The key of the expert whose bytes these are; -2 for those of several."""
        found = {self._whole.bytes[place] for place in self._places}
        return found.pop() if len(found) == 1 else -2

    @key.setter
    def key(self, key: int) -> None:
        for place in self._places:
            self._whole.bytes[place] = key

    def data_ptr(self) -> int:
        return id(self._whole) + self._places.start

    def __getitem__(self, part: slice) -> "Memory":
        assert self._places == range(64), "only whole experts are cut here"
        return Memory(self.gpu, pinned=self.pinned, of=self._whole, part=part)

    def copy_(self, host: "Memory", *, non_blocking: bool) -> None:
        assert non_blocking and host._places == self._places
        self.gpu.num_copied += self.nbytes
        self.gpu.current_stream().add(lambda: setattr(self, "key", host.key))


class HostSource:
    """Every expert in host memory, pinned or not. Reads of the keys in `broken` fail."""

    def __init__(self, gpu: Gpu, *, pinned: bool) -> None:
        self.is_pinned = pinned
        self.experts = [Memory(gpu, pinned=pinned) for _ in range(SHAPE.num_keys)]
        self.broken: set[int] = set()
        for key, memory in enumerate(self.experts):
            memory.key = key

    def view(self, layer: int, expert: int, *, bits: int) -> Memory:
        return self.experts[layer * SHAPE.num_experts + expert]

    def read(self, layer: int, expert: int, out: Memory, *, bits: int) -> None:
        key = layer * SHAPE.num_experts + expert
        if key in self.broken:
            raise OSError(f"key {key} is gone")
        out.key = key


def fake_cuda(patch: pytest.MonkeyPatch, seed: int) -> Gpu:
    """Put a stand-in in the place of `torch.cuda` streams and events."""
    gpu = Gpu(seed)
    patch.setattr(torch.cuda, "Stream", lambda device: Stream(gpu))
    patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(gpu))
    patch.setattr(torch.cuda, "stream", gpu.stream)
    patch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    patch.setattr(cuda, "PIECE_NBYTES", PIECE)
    patch.setattr(cuda, "aligned", lambda nbytes, pin: Memory(gpu, pinned=pin))
    return gpu

"""The order of copies and compute on a GPU, without one: streams that run in the worst order that events allow.

A stand-in for `torch.cuda` keeps what is queued on each stream and runs it later, at random, as far as events permit. A
read that sees another expert than the one it was promised is what a race on a GPU would be.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from artifacts.shape import Shape
from runtime.links import cuda as cudalink
from runtime.links.cuda import CudaLink
from runtime.links.link import DEMAND, PREFETCH, Transfer
from runtime.model.open import open_model
from runtime.tiers import open as tiers
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=64)
DEVICE = torch.device("cuda", 0)
NUM_SLOTS = 4


class Gpu:
    """Two streams or more; `settle` runs what it can in random order until `until` holds or nothing is left."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.streams: list[Stream] = []
        self.current = threading.local()
        self.compute = Stream(self)
        self.time_ms = 0.0

    def current_stream(self, device: object = None) -> "Stream":
        return getattr(self.current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current.stream = self.current_stream(), stream
        yield
        self.current.stream = before

    def settle(self, until: Callable[[], bool] = lambda: False) -> None:
        with self.lock:
            while not until():
                ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
                if not ready:
                    return
                self.time_ms += 1
                self.random.choice(ready).queue.popleft()[1]()


class Stream:
    def __init__(self, gpu: Gpu, priority: int = 0) -> None:
        self.gpu, self.priority, self.queue = gpu, priority, deque()
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
        self.gpu.settle(lambda: not self.queue)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.mark, self.passed = gpu, 0, {0}
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
        self.gpu.settle(self.query)
        assert self.query(), "an event that nothing leads to: a deadlock"

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query()
        return other.time_ms - self.time_ms


class Memory:
    """An expert's bytes, host or device: which key they are. Copies read the host when they run, not when queued."""

    def __init__(self, gpu: Gpu, *, pinned: bool = False) -> None:
        self.gpu, self.key, self.pinned, self.nbytes = gpu, -1, pinned, 64

    def data_ptr(self) -> int:
        return id(self)

    def __getitem__(self, part: slice) -> "Memory":
        return self

    def copy_(self, host: "Memory", *, non_blocking: bool) -> None:
        assert non_blocking
        self.gpu.current_stream().add(lambda: setattr(self, "key", host.key))


class Source:
    """Every expert in host memory, pinned or not; reads of the keys in `broken` fail."""

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
    gpu = Gpu(seed)
    patch.setattr(torch.cuda, "Stream", lambda device, priority=0: Stream(gpu, priority))
    patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(gpu))
    patch.setattr(torch.cuda, "stream", gpu.stream)
    patch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    patch.setattr(cudalink, "aligned", lambda nbytes, pin: Memory(gpu, pinned=pin))
    return gpu


class Run:
    """An engine without a model: slots, what is on its way to them, and reads on the compute stream."""

    def __init__(self, gpu: Gpu, source: Source) -> None:
        self.gpu, self.seen = gpu, []
        self.link = CudaLink(source, SHAPE, device=DEVICE, slot_nbytes=64, is_pinned=source.is_pinned)
        self.slots = [Memory(gpu) for _ in range(NUM_SLOTS)]
        self.pending: dict[int, Transfer] = {}

    def issue(self, key: int, slot: int, urgency: int) -> None:
        if slot in self.pending:
            self.link.cancel(self.pending.pop(slot))
        self.pending[slot] = self.link.issue(key, self.slots[slot], urgency=urgency)

    def use(self, slot: int, key: int) -> None:
        if slot in self.pending:
            self.link.collect(self.pending.pop(slot))
        self.gpu.compute.add(lambda: self.seen.append((key, self.slots[slot].key)))

    def wild(self, steps: int) -> None:
        """Issue, overwrite, cancel and use at random, the GPU lagging behind as far as it likes."""
        pick = self.gpu.random
        held = dict.fromkeys(range(NUM_SLOTS), -1)
        for _ in range(steps):
            slot = pick.randrange(NUM_SLOTS)
            if held[slot] < 0 or pick.random() < 0.5:
                held[slot] = pick.randrange(SHAPE.num_keys)
                self.issue(held[slot], slot, pick.choice((DEMAND, PREFETCH)))
            else:
                self.use(slot, held[slot])
            if pick.random() < 0.05:
                assert self.link.drain_stalls() >= 0
        self.gpu.settle()

    def mistakes(self) -> int:
        assert self.seen
        return sum(wanted != found for wanted, found in self.seen)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("seed", range(8))
def test_compute_reads_what_it_was_promised(monkeypatch: pytest.MonkeyPatch, seed: int, pinned: bool) -> None:
    gpu = fake_cuda(monkeypatch, seed)
    run = Run(gpu, Source(gpu, pinned=pinned))
    run.wild(200)
    run.link.close()
    assert run.mistakes() == 0
    conditions = run.link.conditions()
    assert conditions["host_memory"] == ("pinned" if pinned else "staged")
    assert conditions["measured_gbps"] > 0
    assert not run.link._copied.keys() - set(run.pending.values()), "events of transfers that are over are kept"


class OneBuffer(deque):
    """Every copy is staged in the same buffer, whether or not the one before has been read."""

    def rotate(self, n: int = 1) -> None:
        pass


@pytest.mark.parametrize("broken", ["compute does not wait", "copies do not wait", "staging is not awaited"])
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    mistakes = 0
    for seed in range(8):
        gpu = fake_cuda(monkeypatch, seed)
        run = Run(gpu, Source(gpu, pinned=broken != "staging is not awaited"))
        if broken == "compute does not wait":
            gpu.compute.wait_event = lambda event: None
        elif broken == "copies do not wait":
            run.link._demands.wait_event = run.link._prefetches.wait_event = lambda event: None
        else:
            run.link._staging = OneBuffer(run.link._staging)
        run.wild(200)
        run.link.close()
        mistakes += run.mistakes()
    assert mistakes


class Forgetful(dict):
    """No slot was ever written to."""

    def __contains__(self, place: object) -> bool:
        return False


@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "streams do not wait for each other"])
def test_a_slot_that_is_given_away_keeps_what_came_last(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """A demand comes into a slot to which a prefetch, begun and no longer wanted, is still on its way."""
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, Source(gpu, pinned=True))
    run.link._written = Forgetful() if broken else run.link._written
    gpu.random.choice = lambda ready: next((one for one in ready if one is not run.link._prefetches), ready[0])
    run.issue(0, 0, PREFETCH)
    assert run.pending[0].landed.wait(10)  # handed over, not copied
    run.issue(1, 0, DEMAND)
    run.use(0, 1)
    gpu.settle()
    run.use(0, 1)
    gpu.settle()
    run.link.close()
    assert run.mistakes() == (1 if broken else 0)


def test_a_demand_is_queued_at_once_on_the_stream_that_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, Source(gpu, pinned=True))
    assert run.link._demands.priority < run.link._prefetches.priority
    for slot, key in enumerate((0, 1, 2)):
        run.issue(key, slot, PREFETCH)  # two are handed over, the third waits for one of them
    run.issue(3, 3, DEMAND)
    assert run.link._demands.queue and run.pending[3].landed.is_set()
    run.use(2, 2)  # a prefetch that compute waits for overtakes the others as well, or has begun
    run.use(3, 3)
    gpu.settle()
    run.link.close()
    assert run.mistakes() == 0


def test_what_two_streams_copy_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 1)
    run = Run(gpu, Source(gpu, pinned=True))
    for turn in range(40):
        run.issue(turn % SHAPE.num_keys, turn % NUM_SLOTS, (DEMAND, PREFETCH)[turn % 2])
        run.use(turn % NUM_SLOTS, turn % SHAPE.num_keys)
    gpu.settle()
    run.link.close()
    run.link.drain_stalls()
    assert 0 < run.link.copy_s <= gpu.time_ms / 1e3
    assert run.mistakes() == 0


def test_failed_reads_leave_the_other_transfers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    source = Source(gpu, pinned=False)
    source.broken = {5, 6, 7}
    run = Run(gpu, source)
    run.issue(0, 0, DEMAND)
    run.issue(1, 1, DEMAND)
    for key in (5, 6, 7):
        run.issue(key, 2, DEMAND)
        with pytest.raises(OSError, match=f"key {key}"):
            run.use(2, key)
    run.issue(2, 2, DEMAND)
    for slot, key in ((0, 0), (1, 1), (2, 2)):
        run.use(slot, key)
    gpu.settle()
    run.link.close()
    assert run.mistakes() == 0


def test_a_stall_is_the_time_in_which_compute_had_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, Source(gpu, pinned=True))
    run.issue(0, 0, DEMAND)
    run.use(0, 0)
    assert run.link.drain_stalls() > 0
    run.issue(1, 1, PREFETCH)
    while not run.pending[1].landed.wait(0.01):
        pass
    gpu.settle()
    run.use(1, 1)  # the copy ended long ago
    assert run.link.drain_stalls() == 0
    assert run.link.copy_s > 0
    run.link.close()


def test_experts_in_page_locked_memory_are_not_copied_again(checkpoint: Checkpoint) -> None:
    """No memory is page-locked here: what is, says so."""
    opened = open_model(str(checkpoint("olmoe")))
    plain, pinned = RamStore(opened.store), RamStore(opened.store)
    pinned.is_pinned = True
    assert tiers.copied_to_ram(plain, pin=False) is plain
    assert tiers.copied_to_ram(pinned, pin=True) is pinned and tiers.copied_to_ram(pinned, pin=False) is pinned
    assert tiers.copied_to_ram(opened.store, pin=False) is not opened.store
    opened.store.close()

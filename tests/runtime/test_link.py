"""Links: what is issued arrives, demand overtakes, cancelled slots are free, and emulated time is kept."""

import threading
import time

import pytest
import torch

from artifacts.shape import Shape
from runtime.clock import Timeline, VirtualClock
from runtime.link import DEMAND, PREFETCH, DiskLink, EmulatedLink, Link, VirtualLink

SHAPE = Shape(num_layers=2, num_experts=4, top_k=1, expert_nbytes=64)


class Numbered:
    """Fills a slot with the key's number; can be held, to let a queue build up, or made to fail."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[int] = set()

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> None:
        self.gate.wait()
        key = layer * SHAPE.num_experts + expert
        self.order.append(key)
        if key in self.broken:
            raise OSError(f"key {key} is gone")
        out.fill_(key)


def slots(count: int) -> list[torch.Tensor]:
    return [torch.zeros(64, dtype=torch.uint8) for _ in range(count)]


@pytest.fixture
def source() -> Numbered:
    return Numbered()


@pytest.fixture
def link(source: Numbered):
    made = DiskLink(source, SHAPE)
    yield made
    source.gate.set()
    made.close()


@pytest.fixture(params=["disk", "emulated", "virtual"])
def any_link(request: pytest.FixtureRequest, source: Numbered):
    made = {
        "disk": lambda: DiskLink(source, SHAPE),
        "emulated": lambda: EmulatedLink(source, SHAPE, bandwidth=1e9),
        "virtual": lambda: VirtualLink(source, SHAPE, bandwidth=1e9, clock=VirtualClock()),
    }[request.param]()
    yield made
    made.close()


def test_all_that_is_issued_arrives(any_link: Link) -> None:
    buffers = slots(8)
    transfers = [any_link.issue(key, buffers[key], urgency=DEMAND) for key in range(8)]
    for key, transfer in enumerate(transfers):
        any_link.collect(transfer)
        assert (buffers[key] == key).all()


def test_demand_overtakes_queued_prefetches_and_a_late_prefetch_is_hurried(link: DiskLink, source: Numbered) -> None:
    source.gate.clear()
    buffers = slots(5)
    first = link.issue(0, buffers[0], urgency=PREFETCH)
    while not first.started:
        time.sleep(1e-3)
    prefetches = [link.issue(key, buffers[key], urgency=PREFETCH) for key in (1, 2, 3)]
    demand = link.issue(4, buffers[4], urgency=DEMAND)
    opener = threading.Timer(0.05, source.gate.set)
    opener.start()
    link.collect(prefetches[2])  # behind the demand load, before the other prefetches
    link.collect(demand)
    for transfer in prefetches:
        link.collect(transfer)
    assert source.order == [0, 4, 3, 1, 2]


def test_a_cancelled_transfer_never_writes_its_slot(link: DiskLink, source: Numbered) -> None:
    source.gate.clear()
    buffers = slots(3)
    running = link.issue(1, buffers[1], urgency=PREFETCH)
    while not running.started:
        time.sleep(1e-3)
    queued = link.issue(2, buffers[2], urgency=PREFETCH)
    link.cancel(queued)
    source.gate.set()
    link.cancel(running)  # under way, so it is seen through
    assert (buffers[1] == 1).all()
    link.collect(link.issue(3, buffers[2], urgency=DEMAND))
    assert (buffers[2] == 3).all() and source.order == [1, 3]


def test_an_error_reaches_whoever_collects_and_the_link_goes_on(any_link: Link, source: Numbered) -> None:
    source.broken.add(5)
    buffers = slots(2)
    with pytest.raises(OSError, match="key 5"):
        any_link.collect(any_link.issue(5, buffers[0], urgency=DEMAND))
    any_link.collect(any_link.issue(6, buffers[1], urgency=DEMAND))
    assert (buffers[1] == 6).all()


def test_an_emulated_transfer_takes_at_least_its_time(source: Numbered) -> None:
    link = EmulatedLink(source, SHAPE, bandwidth=64 / 0.01, latency_s=0.005)
    begin_s = time.perf_counter()
    for transfer in [link.issue(key, slot, urgency=DEMAND) for key, slot in enumerate(slots(3))]:
        link.collect(transfer)
    took_s = time.perf_counter() - begin_s
    assert took_s >= 3 * 0.015
    assert 0 < link.drain_stalls() <= took_s
    assert link.drain_stalls() == 0
    link.close()


def test_virtual_time_is_exact(source: Numbered) -> None:
    clock = VirtualClock()
    link = VirtualLink(source, SHAPE, bandwidth=64.0, latency_s=0.5, clock=clock)
    first, second = (link.issue(key, slot, urgency=DEMAND) for key, slot in enumerate(slots(2)))
    clock.time_s = 1.0
    link.collect(first)
    assert link.drain_stalls() == 0.5
    clock.time_s = 5.0
    link.collect(second)
    assert link.drain_stalls() == 0.0


def test_on_virtual_time_demand_overtakes_a_late_prefetch_is_hurried_and_a_cancelled_one_frees_the_line(
    source: Numbered,
) -> None:
    """One second a transfer: 0 is under way when 1 to 4 queue up as prefetches and 5 is demanded."""
    clock = VirtualClock()
    link = VirtualLink(source, SHAPE, bandwidth=64.0, clock=clock)
    buffers = slots(6)
    first, cancelled, third, fourth, last = [link.issue(key, buffers[key], urgency=PREFETCH) for key in range(5)]
    demand = link.issue(5, buffers[5], urgency=DEMAND)
    link.cancel(cancelled)
    lands_at_s = []
    for transfer in (demand, last, fourth, third, first):  # the third begins as soon as the demanded one has landed
        link.collect(transfer)
        lands_at_s.append(clock.time_s)
    assert lands_at_s == [2.0, 4.0, 5.0, 5.0, 5.0]
    assert link.drain_stalls() == 5.0


def test_a_timeline_is_idle_when_nobody_asks() -> None:
    line = Timeline(bandwidth=10.0)
    assert line.reserve(0.0, 20) == 2.0
    assert line.reserve(1.0, 10) == 3.0
    assert line.reserve(10.0, 10) == 11.0


def test_who_waits_for_a_link_that_is_closed_is_told(source: Numbered) -> None:
    link = DiskLink(source, SHAPE)
    source.gate.clear()
    transfers = [link.issue(key, buffer, urgency=DEMAND) for key, buffer in enumerate(slots(2))]
    while not transfers[0].started:
        time.sleep(1e-3)
    closing = threading.Thread(target=link.close)
    closing.start()
    while not link._closed:
        time.sleep(1e-3)
    source.gate.set()
    closing.join()
    link.collect(transfers[0])
    with pytest.raises(RuntimeError, match="link is closed"):
        link.collect(transfers[1])
    with pytest.raises(RuntimeError, match="link is closed"):
        link.issue(2, slots(1)[0], urgency=DEMAND)

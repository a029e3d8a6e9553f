"""Links: what is issued arrives, demand overtakes, cancelled slots are free, and emulated time is kept."""

import threading
import time

import pytest
import torch

from artifacts.shape import Shape
from runtime.clock import Timeline
from runtime.link import DEMAND, PREFETCH, DiskLink, EmulatedLink, VirtualLink

SHAPE = Shape(num_layers=2, num_experts=4, top_k=1, expert_nbytes=64)


class Numbered:
    """Fills a slot with the key's number; can be held, to let a queue build up, or made to fail."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[int] = set()

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
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


@pytest.fixture(params=["disk", "emulated"])
def link(request: pytest.FixtureRequest, source: Numbered):
    made = DiskLink(source, SHAPE) if request.param == "disk" else EmulatedLink(source, SHAPE, bandwidth=1e9)
    yield made
    source.gate.set()
    made.close()


def test_all_that_is_issued_arrives(link: DiskLink) -> None:
    buffers = slots(8)
    transfers = [link.issue(key, buffers[key], urgency=DEMAND) for key in range(8)]
    for key, transfer in enumerate(transfers):
        link.collect(transfer)
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


def test_an_error_reaches_whoever_collects_and_the_link_goes_on(link: DiskLink, source: Numbered) -> None:
    source.broken.add(5)
    buffers = slots(2)
    with pytest.raises(OSError, match="key 5"):
        link.collect(link.issue(5, buffers[0], urgency=DEMAND))
    link.collect(link.issue(6, buffers[1], urgency=DEMAND))
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
    now = [0.0]
    link = VirtualLink(source, SHAPE, bandwidth=64.0, latency_s=0.5, now=lambda: now[0])
    first, second = (link.issue(key, slot, urgency=DEMAND) for key, slot in enumerate(slots(2)))
    now[0] = 1.0
    link.collect(first)
    assert link.drain_stalls() == 0.5
    now[0] = 5.0
    link.collect(second)
    assert link.drain_stalls() == 0.0


def test_a_timeline_is_idle_when_nobody_asks() -> None:
    line = Timeline(bandwidth=10.0)
    assert line.reserve(0.0, 20) == 2.0
    assert line.reserve(1.0, 10) == 3.0
    assert line.reserve(10.0, 10) == 11.0

"""Links: issued transfers arrive, demands overtake, cancelled slots are free, and emulated time is
exact."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from artifacts.shape import Shape
from runtime.control.pools import Partitions
from runtime.links.emulated import EmulatedLink
from runtime.links.link import DEMAND, PREFETCH, DiskLink, Link
from runtime.links.per_device import LinkPerDevice
from tests.helpers.clock import VirtualClock

SHAPE = Shape(num_layers=2, num_experts=4, top_k=1, expert_nbytes=64)


class Numbered:
    """Fills a slot with the key's number. It can be held, so that a queue builds up, or made to
    fail."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[int] = set()
        self.bits: set[int] = set()
        self.pause_s = 0.0

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> None:
        key = layer * SHAPE.num_experts + expert
        self.begun.append(key)
        self.bits.add(bits)
        self.gate.wait()
        time.sleep(self.pause_s)
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
    link = DiskLink(source, SHAPE)
    yield link
    source.gate.set()
    link.close()


@pytest.fixture(params=["disk", "emulated", "virtual", "several"])
def any_link(request: pytest.FixtureRequest, source: Numbered):
    link = {
        "disk": lambda: DiskLink(source, SHAPE),
        "emulated": lambda: EmulatedLink(source, SHAPE, bandwidth=1e9),
        "virtual": lambda: EmulatedLink(source, SHAPE, bandwidth=1e9, clock=VirtualClock()),
        "several": lambda: LinkPerDevice(
            Partitions(SHAPE.num_experts, 2), [DiskLink(source, SHAPE) for _ in range(2)]
        ),
    }[request.param]()
    yield link
    link.close()


def test_every_issued_transfer_arrives(any_link: Link) -> None:
    buffers = slots(8)
    transfers = [any_link.issue(key, buffers[key], urgency=DEMAND) for key in range(8)]
    for key, transfer in enumerate(transfers):
        any_link.collect(transfer)
        assert (buffers[key] == key).all()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.perf_counter() + 10
    while not condition():
        assert time.perf_counter() < deadline_s
        time.sleep(1e-3)


def test_demands_are_read_beside_a_prefetch_and_a_late_prefetch_is_hurried(
    link: DiskLink, source: Numbered
) -> None:
    source.gate.clear()
    buffers = slots(6)
    prefetches = [link.issue(key, buffers[key], urgency=PREFETCH) for key in (0, 1, 2, 3)]
    wait_for(lambda: source.begun == [0])  # one prefetch at a time
    demands = [link.issue(key, buffers[key], urgency=DEMAND) for key in (4, 5)]
    wait_for(lambda: set(source.begun) == {0, 4, 5})
    waiting = threading.Thread(target=link.collect, args=(prefetches[3],))
    waiting.start()
    # compute waits for it, so that it overtakes the other prefetches
    wait_for(lambda: source.begun[3:] == [3])
    source.gate.set()
    waiting.join()
    for transfer in (*demands, *prefetches):
        link.collect(transfer)
    assert source.begun[4:] == [1, 2]


def test_no_more_reads_are_under_way_than_the_conditions_say(
    link: DiskLink, source: Numbered
) -> None:
    source.gate.clear()
    buffers = slots(8)
    transfers = [link.issue(key, buffers[key], urgency=DEMAND) for key in range(8)]
    wait_for(lambda: len(source.begun) == link.num_threads)
    assert not any(transfer.started for transfer in transfers[link.num_threads :])
    source.gate.set()
    for transfer in transfers:
        link.collect(transfer)
    conditions = link.conditions()
    assert conditions["reads_in_flight"] == link.num_threads and conditions["measured_gbps"] > 0


def test_seconds_of_concurrent_reads_count_once(link: DiskLink, source: Numbered) -> None:
    source.gate.clear()
    buffers = slots(3)
    begin_s = time.perf_counter()
    transfers = [link.issue(key, buffers[key], urgency=DEMAND) for key in range(3)]
    wait_for(lambda: len(source.begun) == 3)
    time.sleep(0.02)
    source.gate.set()
    for transfer in transfers:
        link.collect(transfer)
    assert 0.02 <= link.copy_s <= time.perf_counter() - begin_s


def test_a_cancelled_transfer_never_writes_its_slot(link: DiskLink, source: Numbered) -> None:
    source.gate.clear()
    buffers = slots(3)
    running = link.issue(1, buffers[1], urgency=PREFETCH)
    wait_for(lambda: running.started)
    queued = link.issue(2, buffers[2], urgency=PREFETCH)
    link.cancel(queued)
    source.gate.set()
    link.cancel(running)  # it has begun, so it is finished
    assert (buffers[1] == 1).all()
    link.collect(link.issue(3, buffers[2], urgency=DEMAND))
    assert (buffers[2] == 3).all() and source.begun == [1, 3]


def test_collect_raises_the_error_and_the_link_goes_on(any_link: Link, source: Numbered) -> None:
    source.broken.add(5)
    buffers = slots(2)
    with pytest.raises(OSError, match="key 5"):
        any_link.collect(any_link.issue(5, buffers[0], urgency=DEMAND))
    any_link.collect(any_link.issue(6, buffers[1], urgency=DEMAND))
    assert (buffers[1] == 6).all()


def test_a_failed_prefetch_is_read_again_when_it_is_collected(
    link: DiskLink, source: Numbered
) -> None:
    source.broken = {5, 6}
    buffers = slots(2)
    ahead = [
        link.issue(key, slot, urgency=PREFETCH) for key, slot in zip((5, 6), buffers, strict=True)
    ]
    wait_for(lambda: all(map(link.has_landed, ahead)))
    source.broken = {6}
    link.collect(ahead[0])
    assert (buffers[0] == 5).all()
    with pytest.raises(OSError, match="key 6"):
        link.collect(ahead[1])
    assert source.begun == [5, 6, 5, 6]


def test_collecting_from_a_closed_link_raises(source: Numbered) -> None:
    link = DiskLink(source, SHAPE)
    source.gate.clear()
    buffers = slots(link.num_threads + 1)
    *begun, last = [link.issue(key, buffer, urgency=DEMAND) for key, buffer in enumerate(buffers)]
    wait_for(lambda: all(transfer.started for transfer in begun))
    closing = threading.Thread(target=link.close)
    closing.start()
    wait_for(lambda: link._closed)
    source.gate.set()
    closing.join()
    for transfer in begun:
        link.collect(transfer)
    with pytest.raises(RuntimeError, match="link is closed"):
        link.collect(last)
    with pytest.raises(RuntimeError, match="link is closed"):
        link.issue(2, slots(1)[0], urgency=DEMAND)


def test_each_device_has_a_link_of_its_own(source: Numbered) -> None:
    """Two transfers of one device land one after another, and one of the other device meanwhile.
    `clear` clears both links."""
    clock = VirtualClock()
    links = [EmulatedLink(source, SHAPE, bandwidth=64.0, clock=clock) for _ in range(2)]
    link = LinkPerDevice(Partitions(SHAPE.num_experts, 2), links)
    buffers = slots(4)
    first, second, other = (link.issue(key, buffers[key], urgency=PREFETCH) for key in (0, 2, 1))
    clock.time_s = 1.0
    assert [link.has_landed(transfer) for transfer in (first, second, other)] == [True, False, True]
    link.collect(second)
    assert clock.now_s() == 2.0 and link.drain_stalls() == 1.0
    under_way = [link.issue(key, buffers[key], urgency=PREFETCH) for key in (0, 1, 2, 3)]
    link.clear()
    clock.time_s = 9.0
    assert [link.has_landed(transfer) for transfer in under_way] == [True, True, False, False], (
        "begun ones go on"
    )
    assert link.conditions() == links[0].conditions()

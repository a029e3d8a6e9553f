"""The emulated link: its time is exact on a virtual clock, and its conditions are what it was
told."""

import time

import pytest

from runtime.links.clock import ThreadClock, Timeline
from runtime.links.emulated import EmulatedLink
from runtime.links.link import DEMAND, PREFETCH
from tests.helpers.clock import VirtualClock
from tests.runtime.links.test_link import SHAPE, Numbered, slots


@pytest.fixture
def source() -> Numbered:
    return Numbered()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def link(source: Numbered, clock: VirtualClock) -> EmulatedLink:
    """One second a transfer."""
    return EmulatedLink(source, SHAPE, bandwidth=64.0, clock=clock)


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


def test_processor_time_leaves_out_sleep_and_counts_work_and_waits(source: Numbered) -> None:
    clock = ThreadClock()
    link = EmulatedLink(source, SHAPE, bandwidth=64.0, clock=clock)  # one second a transfer
    begin_s = time.perf_counter()
    before_s = clock.now_s()
    time.sleep(0.05)
    assert clock.now_s() - before_s < 0.04
    worked_s = clock.now_s() + 0.01
    while clock.now_s() < worked_s:
        pass
    link.collect(link.issue(0, slots(1)[0], urgency=DEMAND))
    assert clock.now_s() - worked_s >= 1.0 and time.perf_counter() - begin_s < 1.0
    assert link.drain_stalls() == pytest.approx(1.0, abs=0.01)


def test_virtual_time_is_exact(source: Numbered) -> None:
    clock = VirtualClock()
    link = EmulatedLink(source, SHAPE, bandwidth=64.0, latency_s=0.5, clock=clock)
    first, second = (link.issue(key, slot, urgency=DEMAND) for key, slot in enumerate(slots(2)))
    clock.time_s = 1.0
    link.collect(first)
    assert link.drain_stalls() == 0.5
    clock.time_s = 5.0
    link.collect(second)
    assert link.drain_stalls() == 0.0


def test_on_virtual_time_demands_overtake_late_prefetches_are_hurried_and_cancelled_ones_free_the_line(
    source: Numbered,
) -> None:
    """One second a transfer: 0 is under way when 1 to 4 queue up as prefetches and 5 is
    demanded."""
    clock = VirtualClock()
    link = EmulatedLink(source, SHAPE, bandwidth=64.0, clock=clock)
    buffers = slots(6)
    first, cancelled, third, fourth, last = [
        link.issue(key, buffers[key], urgency=PREFETCH) for key in range(5)
    ]
    demand = link.issue(5, buffers[5], urgency=DEMAND)
    link.cancel(cancelled)
    lands_at_s = []
    for transfer in (
        demand,
        last,
        fourth,
        third,
        first,
    ):  # the third begins as soon as the demand has landed
        link.collect(transfer)
        lands_at_s.append(clock.time_s)
    assert lands_at_s == [2.0, 4.0, 5.0, 5.0, 5.0]
    assert link.drain_stalls() == 5.0


def test_a_timeline_is_idle_between_transfers() -> None:
    line = Timeline(bandwidth=10.0)
    assert line.reserve(0.0, 20) == 2.0
    assert line.reserve(1.0, 10) == 3.0
    assert line.reserve(10.0, 10) == 11.0


def test_the_conditions_are_what_was_said(source: Numbered) -> None:
    link = EmulatedLink(source, SHAPE, bandwidth=2e9, latency_s=5e-6)
    assert link.conditions() == {"kind": "emulated", "bandwidth_gbps": 2.0, "latency_us": 5.0}
    assert link.drain_stalls() == 0 and not link.is_concurrent


def test_the_line_is_free_at_the_very_instant_at_which_a_transfer_lands(
    link: EmulatedLink, clock: VirtualClock
) -> None:
    buffers = slots(4)
    first = link.issue(0, buffers[0], urgency=PREFETCH)
    assert first.started and first.lands_at_s == 1.0 and not link.has_landed(first)
    clock.time_s = 1.0
    assert link.has_landed(first)
    second = link.issue(1, buffers[1], urgency=PREFETCH)
    assert second.started and second.lands_at_s == 2.0
    waiting = link.issue(2, buffers[2], urgency=PREFETCH)
    assert not waiting.started and not link.has_landed(waiting)
    clock.time_s = 2.0
    assert not link.has_landed(waiting) and waiting.started
    assert waiting.lands_at_s == 3.0


def test_a_line_that_was_idle_begins_when_a_transfer_is_issued(
    link: EmulatedLink, clock: VirtualClock
) -> None:
    clock.time_s = 7.0
    assert link.issue(0, slots(1)[0], urgency=DEMAND).lands_at_s == 8.0


def test_collecting_what_has_landed_costs_no_stall_and_waiting_costs_what_is_left(
    link: EmulatedLink, clock: VirtualClock
) -> None:
    buffers = slots(2)
    first, second = (link.issue(key, buffers[key], urgency=DEMAND) for key in (0, 1))
    clock.time_s = 1.25
    link.collect(first)
    assert link.drain_stalls() == 0.0 and clock.time_s == 1.25
    link.collect(second)
    assert link.drain_stalls() == 0.75 and (buffers[1] == 1).all()


def test_demands_keep_their_order_before_prefetches(link: EmulatedLink) -> None:
    """Also after some were cancelled, hurried or cleared away."""
    buffers = slots(8)

    def order(transfers: list) -> list[int]:
        assert all(not transfer.started for transfer in transfers)
        link.collect(link._queue[-1])
        return sorted(range(len(transfers)), key=lambda number: transfers[number].lands_at_s)

    for _ in range(2):
        link.issue(0, buffers[0], urgency=DEMAND)
        kinds = (PREFETCH, DEMAND, PREFETCH, DEMAND, DEMAND)
        queued = [
            link.issue(key, buffers[key], urgency=kind) for key, kind in enumerate(kinds, start=1)
        ]
        link.cancel(queued.pop(3))
        link.cancel(queued.pop(0))
        queued.append(link.issue(6, buffers[6], urgency=DEMAND))
        assert order(queued) == [0, 2, 3, 1], "demands 2, 5 and 6, then prefetch 3"
        link.issue(0, buffers[0], urgency=DEMAND)
        for kind in (DEMAND, DEMAND, PREFETCH):
            link.issue(7, buffers[7], urgency=kind)
        link.clear()
        assert link._queue == []


def test_a_hurried_prefetch_comes_behind_the_demands_and_before_the_other_prefetches(
    link: EmulatedLink, clock: VirtualClock
) -> None:
    buffers = slots(6)
    link.issue(0, buffers[0], urgency=DEMAND)
    ahead, hurried = (link.issue(key, buffers[key], urgency=PREFETCH) for key in (1, 2))
    demand = link.issue(3, buffers[3], urgency=DEMAND)
    link.collect(hurried)
    assert (demand.lands_at_s, hurried.lands_at_s, clock.time_s) == (2.0, 3.0, 3.0)
    later = link.issue(4, buffers[4], urgency=DEMAND)
    link.collect(ahead)
    assert ahead.lands_at_s == 4.0 and not later.started


def test_a_demand_that_is_collected_in_the_queue_keeps_its_place(link: EmulatedLink) -> None:
    """And the demands after it come before the prefetches."""
    buffers = slots(6)
    link.issue(0, buffers[0], urgency=DEMAND)
    first, second = (link.issue(key, buffers[key], urgency=DEMAND) for key in (1, 2))
    begun, waiting = (link.issue(key, buffers[key], urgency=PREFETCH) for key in (3, 4))
    link.collect(second)
    later = link.issue(5, buffers[5], urgency=DEMAND)
    link.collect(waiting)
    assert [each.lands_at_s for each in (first, second, begun, later, waiting)] == [
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
    ]


def test_a_cancelled_transfer_that_has_begun_keeps_the_line(link: EmulatedLink) -> None:
    buffers = slots(2)
    link.cancel(link.issue(0, buffers[0], urgency=DEMAND))
    second = link.issue(1, buffers[1], urgency=DEMAND)
    link.collect(second)
    assert second.lands_at_s == 2.0 and not buffers[0].any()

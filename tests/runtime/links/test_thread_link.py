"""A link of threads: what it waits for, what it counts, and when it gives up."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from artifacts.errors import OutOfResources
from artifacts.shape import FULL_BITS
from runtime.links import link as module
from runtime.links.link import DEMAND, PREFETCH, DiskLink, ThreadLink, ThreadTransfer
from tests.runtime.links.test_link import SHAPE, Numbered, slots, wait_for


@pytest.fixture
def source() -> Numbered:
    return Numbered()


@pytest.fixture
def link(source: Numbered) -> Iterator[DiskLink]:
    link = DiskLink(source, SHAPE)
    yield link
    source.gate.set()
    link.close()


class OneByOne(ThreadLink):
    """The plain thread link."""

    def _move(self, transfer: ThreadTransfer) -> None:
        self._read(transfer, transfer.slot)


def test_a_thread_link_moves_one_expert_at_a_time_unless_it_says_otherwise(
    source: Numbered,
) -> None:
    link = OneByOne(source, SHAPE)
    buffers = slots(3)
    source.gate.clear()
    transfers = [link.issue(key, buffers[key], urgency=DEMAND) for key in range(3)]
    wait_for(lambda: source.begun == [0])
    assert [transfer.started for transfer in transfers] == [True, False, False]
    source.gate.set()
    for key, transfer in enumerate(transfers):
        link.collect(transfer)
        assert (buffers[key] == key).all()
    assert source.begun == [0, 1, 2] and source.bits == {FULL_BITS} and not link.is_concurrent
    assert link.conditions() == {"kind": "thread"}, (
        "it counts no bytes, so that there is no bandwidth"
    )
    assert all(thread.daemon for thread in link._threads), (
        "one that is stuck must not keep the process alive"
    )
    link.close()


def test_a_slot_that_was_made_in_inference_mode_is_written(source: Numbered) -> None:
    link = OneByOne(source, SHAPE)
    with torch.inference_mode():
        slot = slots(1)[0]
    link.collect(link.issue(3, slot, urgency=PREFETCH))
    assert slot.is_inference() and (slot == 3).all()
    link.close()


def test_the_measured_bandwidth_is_bytes_over_seconds(link: DiskLink) -> None:
    buffers = slots(3)
    assert "measured_gbps" not in link.conditions()
    for transfer in [link.issue(key, buffers[key], urgency=DEMAND) for key in range(3)]:
        link.collect(transfer)
    link.wait_for_copies()
    assert link.conditions()["measured_gbps"] == pytest.approx(
        3 * 64 / link.copy_s / 1e9, rel=1e-12
    )


def test_a_stall_is_the_time_that_collecting_waits(link: DiskLink, source: Numbered) -> None:
    assert link.drain_stalls() == 0
    source.gate.clear()
    transfer = link.issue(1, slots(1)[0], urgency=DEMAND)
    begin_s = time.perf_counter()
    opening = threading.Timer(0.2, source.gate.set)
    opening.start()
    link.collect(transfer)
    assert 0 < link.drain_stalls() <= time.perf_counter() - begin_s
    link.collect(transfer)
    assert link.drain_stalls() == 0, "what has landed is not waited for"


def test_a_failed_demand_is_read_once(link: DiskLink, source: Numbered) -> None:
    source.broken.add(5)
    with pytest.raises(OSError, match="key 5"):
        link.collect(link.issue(5, slots(1)[0], urgency=DEMAND))
    assert source.begun == [5]


def test_a_prefetch_that_is_under_way_is_waited_for_and_not_read_again(
    link: DiskLink, source: Numbered
) -> None:
    source.gate.clear()
    transfer = link.issue(1, slots(1)[0], urgency=PREFETCH)
    wait_for(lambda: transfer.started)
    threading.Timer(0.2, source.gate.set).start()
    link.collect(transfer)
    assert source.begun == [1] and transfer.urgency == PREFETCH


def test_copies_that_have_begun_are_waited_for_and_queued_ones_are_not(
    link: DiskLink, source: Numbered
) -> None:
    source.gate.clear()
    buffers = slots(2)
    begun, queued = (link.issue(key, buffers[key - 1], urgency=PREFETCH) for key in (1, 2))
    wait_for(lambda: begun.started)
    link.clear()
    opening = threading.Timer(0.2, source.gate.set)
    opening.start()
    link.wait_for_copies()
    assert (buffers[0] == 1).all() and not queued.started and source.begun == [1]


def test_a_cancelled_transfer_leaves_the_others_in_the_queue(
    link: DiskLink, source: Numbered
) -> None:
    source.gate.clear()
    buffers = slots(4)
    transfers = [link.issue(key, buffers[key], urgency=PREFETCH) for key in range(4)]
    wait_for(lambda: transfers[0].started)
    link.cancel(transfers[1])
    source.gate.set()
    for key in (3, 0, 2):
        link.collect(transfers[key])
        assert (buffers[key] == key).all()
    assert 1 not in source.begun


def test_a_link_that_is_stuck_says_so_and_one_that_is_slow_does_not(source: Numbered) -> None:
    """The patience begins anew whenever a transfer lands. Keys beyond the model are segments of its
    experts."""
    link = OneByOne(source, SHAPE, patience_s=0.1)
    buffers = slots(8)
    source.pause_s = 0.04
    for transfer in [link.issue(key, buffers[key], urgency=DEMAND) for key in range(8)][::-1]:
        link.collect(transfer)
    source.gate.clear()
    with pytest.raises(
        OutOfResources, match="nothing came over the thread link for 0.1 s, not layer 1, expert 3"
    ):
        link.collect(link.issue(SHAPE.num_keys + 7, buffers[0], urgency=DEMAND))
    source.gate.set()
    link.close()


def test_closing_waits_for_reads_but_not_for_ever(
    source: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = OneByOne(source, SHAPE)
    source.pause_s = 0.03
    link.issue(1, slots(1)[0], urgency=DEMAND)
    wait_for(lambda: source.begun == [1])
    link.close()
    assert not any(thread.is_alive() for thread in link._threads)
    monkeypatch.setattr(module, "_CLOSING_S", 0.05)
    stuck = OneByOne(source, SHAPE)
    source.gate.clear()
    stuck.issue(2, slots(1)[0], urgency=DEMAND)
    wait_for(lambda: source.begun == [1, 2])
    begin_s = time.perf_counter()
    stuck.close()
    assert 0.04 < time.perf_counter() - begin_s < 5, "on a busy machine too"
    source.gate.set()


def test_a_failed_prefetch_is_not_begun_again_on_a_closed_link(
    link: DiskLink, source: Numbered
) -> None:
    source.broken.add(1)
    transfer = link.issue(1, slots(1)[0], urgency=PREFETCH)
    wait_for(lambda: link.has_landed(transfer))
    link.close()
    with pytest.raises(OSError, match="key 1"):
        link.collect(transfer)
    assert source.begun == [1]

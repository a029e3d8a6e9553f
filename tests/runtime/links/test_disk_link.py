"""The disk link: what the page cache has is copied at once, and seconds of reads are counted
once."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from artifacts.shape import FULL_BITS
from runtime.links import link as module
from runtime.links.link import DEMAND, PREFETCH, DiskLink
from tests.runtime.links.test_link import SHAPE, Numbered, slots, wait_for


class Cached(Numbered):
    """A source that has the experts `held` in the page cache."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.asked: list[int] = []

    def read_kept(self, layer: int, expert: int, out: torch.Tensor) -> bool:
        key = layer * SHAPE.num_experts + expert
        self.asked.append(key)
        if key in self.held:
            out.fill_(key + 100)
        return key in self.held


@pytest.fixture
def source() -> Cached:
    return Cached()


@pytest.fixture
def link(source: Cached) -> Iterator[DiskLink]:
    link = DiskLink(source, SHAPE, kept={FULL_BITS: source})
    yield link
    source.gate.set()
    link.close()


def test_a_small_demand_that_is_in_the_page_cache_is_copied_at_once(
    link: DiskLink, source: Cached
) -> None:
    source.held = {1, 2}
    (slot,) = slots(1)
    transfer = link.issue(1, slot, urgency=DEMAND)
    assert (
        link.has_landed(transfer)
        and transfer.started
        and (slot == 101).all()
        and source.begun == []
    )
    link.cancel(transfer)  # it has begun, so that there is nothing in the queue
    assert 0 < link.copy_s < 10 and link.conditions()["measured_gbps"] == pytest.approx(
        64 / link.copy_s / 1e9
    )
    link.collect(link.issue(2, slot, urgency=PREFETCH))  # a thread reads it, and compute goes on
    link.collect(link.issue(4, slot, urgency=DEMAND))
    assert source.begun == [2, 4] and source.asked == [1, 4]
    link.close()
    with pytest.raises(RuntimeError, match="link is closed"):
        link.issue(1, slot, urgency=DEMAND)
    assert source.asked == [1, 4]


def test_a_demand_of_more_than_a_mebibyte_is_left_to_a_thread(
    link: DiskLink, source: Cached
) -> None:
    source.held = {1}
    for nbytes in (1 << 20, (1 << 20) + 1):
        link.collect(link.issue(1, torch.zeros(nbytes, dtype=torch.uint8), urgency=DEMAND))
    assert source.asked == [1] and source.begun == [1]


@pytest.mark.parametrize(
    ("named", "threads", "cache"),
    [
        ({}, 4, "used"),
        ({"is_direct": True}, 8, "bypassed"),
        ({"is_direct": True, "num_threads": 2}, 2, "bypassed"),
        ({"num_threads": 1}, 1, "used"),
    ],
)
def test_the_conditions_name_the_page_cache_and_the_reads_in_flight(
    source: Cached, named: dict, threads: int, cache: str
) -> None:
    link = DiskLink(source, SHAPE, **named)
    assert link.conditions() == {"kind": "disk", "reads_in_flight": threads, "page_cache": cache}
    assert len(link._threads) == threads and link.is_concurrent is named.get("is_direct", False)
    link.close()


def test_seconds_of_reads_that_overlap_count_once_and_idle_ones_not_at_all(
    link: DiskLink, source: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three reads begin at 1 s, 2 s and 4 s and end together at 5 s; one more takes from 50 s to 52
    s."""
    now_s = [1.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    source.gate.clear()
    buffers = slots(4)
    transfers = []
    for key, at_s in enumerate((1.0, 2.0, 4.0)):
        now_s[0] = at_s
        transfers.append(link.issue(key, buffers[key], urgency=DEMAND))
        wait_for(lambda key=key: len(source.begun) == key + 1)
    now_s[0] = 5.0
    source.gate.set()
    for transfer in transfers:
        transfer.landed.wait()
    assert link.copy_s == 4.0
    source.gate.clear()
    now_s[0] = 50.0
    transfers.append(link.issue(3, buffers[3], urgency=DEMAND))
    wait_for(lambda: len(source.begun) == 4)
    now_s[0] = 52.0
    source.gate.set()
    transfers[-1].landed.wait()
    assert link.copy_s == 6.0 and link._num_reading == 0
    assert link.conditions()["measured_gbps"] == pytest.approx(4 * 64 / 6.0 / 1e9)

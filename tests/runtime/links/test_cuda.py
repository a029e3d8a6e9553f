"""The order of copies and compute on a GPU, without one: a stand-in runs its streams in any order that events allow."""

from collections import deque

import pytest
import torch

from runtime.links.cuda import CudaLink
from runtime.links.link import DEMAND, PREFETCH, Transfer
from runtime.model.open import open_model
from runtime.tiers.open import copied_to_ram
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint
from tests.helpers.fake_gpu import SHAPE, Gpu, HostSource, Memory, fake_cuda

DEVICE = torch.device("cuda", 0)
NUM_SLOTS = 4


class Run:
    """An engine without a model: slots, the transfers under way to them, and reads on the compute stream."""

    def __init__(self, gpu: Gpu, source: HostSource) -> None:
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

    def use_at_random(self, steps: int) -> None:
        """Issue, overwrite, cancel and use at random, while the GPU lags behind by any amount."""
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
        self.gpu.run()

    def mistakes(self) -> int:
        assert self.seen
        return sum(wanted != read for wanted, read in self.seen)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("seed", range(8))
def test_compute_reads_the_promised_expert(monkeypatch: pytest.MonkeyPatch, seed: int, pinned: bool) -> None:
    gpu = fake_cuda(monkeypatch, seed)
    run = Run(gpu, HostSource(gpu, pinned=pinned))
    run.use_at_random(200)
    run.link.close()
    assert run.mistakes() == 0
    conditions = run.link.conditions()
    assert conditions["host_memory"] == ("pinned" if pinned else "staged")
    assert conditions["measured_gbps"] > 0
    assert not run.link._copied.keys() - set(run.pending.values()), "events of transfers that have ended are kept"


class OneBuffer(deque):
    """Stages every copy in the same buffer, whether or not the copy before it has been read."""

    def rotate(self, n: int = 1) -> None:
        pass


@pytest.mark.parametrize("broken", ["compute does not wait", "copies do not wait", "staging is not awaited"])
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    mistakes = 0
    for seed in range(8):
        gpu = fake_cuda(monkeypatch, seed)
        run = Run(gpu, HostSource(gpu, pinned=broken != "staging is not awaited"))
        if broken == "compute does not wait":
            gpu.compute.wait_event = lambda event: None
        elif broken == "copies do not wait":
            run.link._demands.wait_event = run.link._prefetches.wait_event = lambda event: None
        else:
            run.link._staging = OneBuffer(run.link._staging)
        run.use_at_random(200)
        run.link.close()
        mistakes += run.mistakes()
    assert mistakes


class Forgetful(dict):
    """Says that no slot was ever written to."""

    def __contains__(self, place: object) -> bool:
        return False


@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "streams do not wait for each other"])
def test_a_reused_slot_keeps_the_last_transfer(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """A demand comes into a slot while an unwanted prefetch that has begun is still under way to it."""
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, HostSource(gpu, pinned=True))
    run.link._written = Forgetful() if broken else run.link._written
    gpu.random.choice = lambda ready: next((stream for stream in ready if stream is not run.link._prefetches), ready[0])
    run.issue(0, 0, PREFETCH)
    assert run.pending[0].landed.wait(10)  # queued, not copied
    run.issue(1, 0, DEMAND)
    run.use(0, 1)
    gpu.run()
    run.use(0, 1)
    gpu.run()
    run.link.close()
    assert run.mistakes() == (1 if broken else 0)


def test_a_demand_is_queued_at_once_on_the_stream_of_higher_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, HostSource(gpu, pinned=True))
    assert run.link._demands.priority < run.link._prefetches.priority
    for slot, key in enumerate((0, 1, 2)):
        run.issue(key, slot, PREFETCH)  # two are queued, the third waits for one of them
    run.issue(3, 3, DEMAND)
    assert run.link._demands.queue and run.pending[3].landed.is_set()
    run.use(2, 2)  # a prefetch that compute waits for also overtakes the others, or has begun
    run.use(3, 3)
    gpu.run()
    run.link.close()
    assert run.mistakes() == 0


def test_seconds_in_which_two_streams_copy_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 1)
    run = Run(gpu, HostSource(gpu, pinned=True))
    for turn in range(40):
        run.issue(turn % SHAPE.num_keys, turn % NUM_SLOTS, (DEMAND, PREFETCH)[turn % 2])
        run.use(turn % NUM_SLOTS, turn % SHAPE.num_keys)
    gpu.run()
    run.link.close()
    run.link.drain_stalls()
    assert 0 < run.link.copy_s <= gpu.time_ms / 1e3
    assert run.mistakes() == 0


def test_failed_reads_leave_the_other_transfers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    source = HostSource(gpu, pinned=False)
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
    gpu.run()
    run.link.close()
    assert run.mistakes() == 0


def test_a_stall_is_the_time_in_which_compute_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, HostSource(gpu, pinned=True))
    run.issue(0, 0, DEMAND)
    run.use(0, 0)
    assert run.link.drain_stalls() > 0
    run.issue(1, 1, PREFETCH)
    while not run.pending[1].landed.wait(0.01):
        pass
    gpu.run()
    run.use(1, 1)  # the copy ended long ago
    assert run.link.drain_stalls() == 0
    assert run.link.copy_s > 0
    run.link.close()


def test_experts_in_page_locked_memory_are_not_copied_again(checkpoint: Checkpoint) -> None:
    """Nothing is page-locked on this machine: the store only says that it is."""
    opened = open_model(str(checkpoint("olmoe")))
    plain, pinned = RamStore(opened.store), RamStore(opened.store)
    pinned.is_pinned = True
    assert copied_to_ram(plain, pin=False) is plain
    assert copied_to_ram(pinned, pin=True) is pinned and copied_to_ram(pinned, pin=False) is pinned
    assert copied_to_ram(opened.store, pin=False) is not opened.store
    opened.store.close()

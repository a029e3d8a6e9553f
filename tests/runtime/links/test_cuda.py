"""The order of copies and compute on a GPU, without one: a stand-in runs its streams in any order
that events allow."""

import threading

import pytest
import torch

from runtime.links.cuda import CudaLink
from runtime.links.link import DEMAND, PREFETCH, Transfer, Wanted
from runtime.model.open import open_model
from runtime.tiers.open import copied_to_ram
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint
from tests.helpers.fake_gpu import PIECE, SHAPE, Event, Gpu, HostSource, Memory, fake_cuda
from tests.runtime.links.test_link import wait_for

DEVICE = torch.device("cuda", 0)
NUM_SLOTS = 4


class Run:
    """An engine without a model: slots, the transfers under way to them, and reads on the compute
    stream."""

    def __init__(self, gpu: Gpu, source: HostSource) -> None:
        self.gpu = gpu
        self.seen = []
        self.link = CudaLink(
            source, SHAPE, device=DEVICE, slot_nbytes=64, is_pinned=source.is_pinned
        )
        self.slots = [Memory(gpu) for _ in range(NUM_SLOTS)]
        self.pending: dict[int, Transfer] = {}

    def issue(self, key: int, slot: int, urgency: int) -> None:
        self.issue_all({slot: key}, urgency)

    def issue_all(self, keys: dict[int, int], urgency: int) -> None:
        for slot in self.pending.keys() & keys:
            self.link.cancel(self.pending.pop(slot))
        loads = [Wanted(key, self.slots[slot]) for slot, key in keys.items()]
        self.pending.update(zip(keys, self.link.issue_all(loads, urgency=urgency), strict=True))

    def use(self, slot: int, key: int) -> None:
        self.use_all({slot: key})

    def use_all(self, keys: dict[int, int]) -> None:
        self.link.collect_all([self.pending.pop(slot) for slot in keys if slot in self.pending])
        for slot, key in keys.items():
            self.gpu.compute.add(
                lambda slot=slot, key=key: self.seen.append((key, self.slots[slot].key))
            )

    def use_at_random(self, steps: int) -> None:
        """Issue, overwrite, cancel and use at random, while the GPU lags behind by any amount."""
        pick = self.gpu.random
        held = dict.fromkeys(range(NUM_SLOTS), -1)
        for _ in range(steps):
            slots = pick.sample(range(NUM_SLOTS), pick.choice((1, 1, 2)))
            if min(held[slot] for slot in slots) < 0 or pick.random() < 0.5:
                held |= (keys := {slot: pick.randrange(SHAPE.num_keys) for slot in slots})
                self.issue_all(keys, pick.choice((DEMAND, PREFETCH)))
            else:
                self.use_all({slot: held[slot] for slot in slots})
            if pick.random() < 0.05:
                assert self.link.drain_stalls() >= 0
        self.gpu.run()

    def mistakes(self) -> int:
        assert self.seen
        return sum(wanted != read for wanted, read in self.seen)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("seed", range(8))
def test_compute_reads_the_promised_expert(
    monkeypatch: pytest.MonkeyPatch, seed: int, pinned: bool
) -> None:
    gpu = fake_cuda(monkeypatch, seed)
    run = Run(gpu, HostSource(gpu, pinned=pinned))
    run.use_at_random(200)
    run.link.close()
    assert run.mistakes() == 0
    conditions = run.link.conditions()
    assert conditions["host_memory"] == ("pinned" if pinned else "staged")
    assert conditions["measured_gbps"] > 0


@pytest.mark.parametrize(
    "broken", ["compute does not wait", "copies do not wait", "staging is not awaited"]
)
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
            for staging in run.link._staging:
                staging.read.synchronize = lambda: None
        run.use_at_random(200)
        run.link.close()
        mistakes += run.mistakes()
    assert mistakes


class Held(Run):
    """A run whose GPU copies nothing until `release`: no wait for one of its events ends before."""

    def __init__(self, patch: pytest.MonkeyPatch, *, pinned: bool = True) -> None:
        self.freed = threading.Event()
        gpu = fake_cuda(patch, 0)
        finish = Event.synchronize

        def wait(event: Event) -> None:
            assert event.query() or threading.current_thread() is not threading.main_thread(), (
                "the host waits"
            )
            assert event.query() or self.freed.wait(10)
            finish(event)

        patch.setattr(Event, "synchronize", wait)
        super().__init__(gpu, HostSource(gpu, pinned=pinned))

    def end(self) -> None:
        self.freed.set()
        self.gpu.run()
        self.link.close()


class Forgetful(dict):
    """Says that no slot was ever written to."""

    def get(self, place: object) -> None:
        return None


@pytest.mark.parametrize(
    "broken", [False, True], ids=["as it is", "streams do not wait for each other"]
)
def test_a_reused_slot_keeps_the_last_transfer(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """A demand comes into a slot while an unwanted prefetch that has begun is still under way to
    it."""
    run = Held(monkeypatch)
    gpu = run.gpu
    run.link._written = Forgetful() if broken else run.link._written
    gpu.random.choice = lambda ready: next(
        (stream for stream in ready if stream is not run.link._prefetches), ready[0]
    )
    run.issue(0, 0, PREFETCH)
    wait_for(lambda: gpu.num_copied == 2 * PIECE)  # queued, not copied
    run.issue(1, 0, DEMAND)
    run.use(0, 1)
    gpu.run()
    run.use(0, 1)
    run.end()
    assert run.mistakes() == (1 if broken else 0)


def test_a_demand_waits_for_two_pieces_of_a_prefetch_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Held(monkeypatch)
    for slot, key in enumerate((0, 1, 2)):
        run.issue(key, slot, PREFETCH)
    wait_for(lambda: run.gpu.num_copied == 2 * PIECE)
    run.issue(3, 3, DEMAND)
    assert run.link._demands.queue and run.pending[3].num_handed == 64
    assert run.gpu.num_copied == 2 * PIECE + 64
    run.use(0, 0)  # what is left of the prefetch that has begun
    assert run.gpu.num_copied == 64 + 64
    run.use(2, 2)  # one that had not begun
    assert run.gpu.num_copied == 64 + 64 + 64
    run.use(3, 3)
    run.end()
    assert run.mistakes() == 0


def test_no_piece_is_handed_over_while_a_demand_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Held(monkeypatch)
    run.issue(0, 0, DEMAND)
    run.issue(1, 1, PREFETCH)
    wait_for(lambda: run.pending[1].started)
    assert not run.pending[1].landed.wait(0.05) and run.pending[1].num_handed == 0
    run.freed.set()
    assert run.pending[1].landed.wait(10)
    run.use(0, 0)
    run.use(1, 1)
    run.end()
    assert run.mistakes() == 0


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
def test_what_is_left_of_a_cancelled_prefetch_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """The host does not wait for what has begun either."""
    run = Held(monkeypatch, pinned=pinned)
    run.issue(0, 0, PREFETCH)
    wait_for(lambda: run.gpu.num_copied == 2 * PIECE)
    run.link.cancel(run.pending.pop(0))
    run.issue(4, 1, PREFETCH)
    run.link.clear()
    run.link.wait_for_copies()
    run.freed.set()
    run.pending.clear()
    run.issue(1, 0, DEMAND)
    run.use(0, 1)
    run.end()
    assert run.mistakes() == 0
    assert run.gpu.num_copied == 2 * PIECE + 64


def test_a_piece_that_fails_is_handed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the thread does not hide behind another one."""
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, HostSource(gpu, pinned=True))
    copy = Memory.copy_
    failures = iter([RuntimeError("once")])

    def fail_once(memory: Memory, host: Memory, *, non_blocking: bool) -> None:
        for error in failures:
            raise error
        copy(memory, host, non_blocking=non_blocking)

    monkeypatch.setattr(Memory, "copy_", fail_once)
    run.issue(3, 0, PREFETCH)
    assert run.pending[0].landed.wait(10) and run.pending[0].error
    run.use(0, 3)
    gpu.run()
    run.link.close()
    assert run.mistakes() == 0


def test_a_failed_read_ahead_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda(monkeypatch, 0)
    source = HostSource(gpu, pinned=False)
    run = Run(gpu, source)
    source.broken = {5}
    run.issue(5, 0, PREFETCH)
    assert run.pending[0].landed.wait(10) and run.pending[0].error
    source.broken = set()
    run.use(0, 5)
    gpu.run()
    run.link.close()
    assert run.mistakes() == 0


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "staged"])
def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """How many are in use at a time varies with the thread that hands pieces over; one lost a step
    would be 29 more."""
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, HostSource(gpu, pinned=pinned))
    made = []
    for step in range(60):
        run.issue(step % SHAPE.num_keys, step % 2, DEMAND)
        run.issue((step + 5) % SHAPE.num_keys, 2 + step % 2, PREFETCH)
        run.use(step % 2, step % SHAPE.num_keys)
        run.use(2 + step % 2, (step + 5) % SHAPE.num_keys)
        gpu.run()
        run.link.drain_stalls()
        made.append(gpu.num_events)
    run.link.close()
    assert run.mistakes() == 0
    assert made[-1] < made[30] + 10, f"of 60 steps: {made}"


@pytest.mark.parametrize("urgency", [DEMAND, PREFETCH])
def test_loads_of_a_step_share_their_events(monkeypatch: pytest.MonkeyPatch, urgency: int) -> None:
    """A demand was recorded three times, and a prefetch waited for an event of its own."""
    gpu = fake_cuda(monkeypatch, 0)
    run = Run(gpu, HostSource(gpu, pinned=True))
    recorded = []
    record = Event.record
    monkeypatch.setattr(
        Event, "record", lambda event, stream: recorded.append(stream) or record(event, stream)
    )
    run.link._wake.acquire()  # the thread does not begin
    run.issue_all({0: 5, 1: 6, 2: 7}, urgency)
    run.link._wake.release()
    of_demands = [run.link._demands] * 3  # begun, done, and what prefetches wait for
    assert recorded[:4] == ([gpu.compute, *of_demands] if urgency == DEMAND else [gpu.compute])
    run.use_all({0: 5, 1: 6, 2: 7})
    run.link.close()
    gpu.run()
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
    wait_for(run.pending[1].landed.is_set)
    gpu.run()
    run.use(1, 1)  # the copy ended long ago
    assert run.link.drain_stalls() == 0
    assert run.link.copy_s > 0
    run.link.close()


def test_experts_in_page_locked_memory_are_not_copied_again(checkpoint: Checkpoint) -> None:
    """Nothing is page-locked on this machine: the store only says that it is."""
    opened = open_model(str(checkpoint("olmoe")))
    plain = RamStore(opened.store)
    pinned = RamStore(opened.store)
    pinned.is_pinned = True
    assert copied_to_ram(plain, pin=False) is plain
    assert copied_to_ram(pinned, pin=True) is pinned and copied_to_ram(pinned, pin=False) is pinned
    assert copied_to_ram(opened.store, pin=False) is not opened.store
    opened.store.close()

"""A number follows a transfer's bytes and not before, whatever the GPU does first, and a slot keeps
the last transfer: by the stand-in that runs streams in any order that events allow."""

import pytest
import torch

from runtime.links import cuda_flags
from runtime.links.cuda import CudaLink
from runtime.links.cuda_flags import FlaggedCopies
from runtime.links.link import DEMAND, PREFETCH, Wanted
from tests.helpers.fake_gpu import PIECE, SHAPE, Gpu, HostSource, Memory, fake_cuda

SLOTS = 4
COUNT = 64  # of numbers, so that they begin anew in a test


class Landed:
    """The number in the device's memory, and the history of it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.number = 0

    def copy_(self, numbers: range, *, non_blocking: bool) -> None:
        assert non_blocking and len(numbers) == 1
        self.gpu.current_stream().add(lambda: setattr(self, "number", numbers[0]))


class Run:
    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.gpu = fake_cuda(patch, seed)
        patch.setattr(cuda_flags, "PIECE_NBYTES", PIECE)
        source = HostSource(self.gpu, pinned=True)
        device = torch.device("cuda", 0)
        self.link = CudaLink(source, SHAPE, device=device, slot_nbytes=64, is_pinned=True)
        self.landed = Landed(self.gpu)
        self.copies = FlaggedCopies(self.link, self.landed, range(COUNT))
        self.seen = []
        self.slots = [Memory(self.gpu) for _ in range(SLOTS)]

    def issue(self, keys: dict[int, int], urgency: int) -> list:
        loads = [Wanted(key, self.slots[slot]) for slot, key in keys.items()]
        return self.copies.issue_all(loads, urgency=urgency)

    def read(self, slot: int, key: int) -> None:
        self.gpu.compute.add(lambda: self.seen.append((key, self.slots[slot].key)))

    def has_come(self, number: int) -> bool:
        """Do as the kernel that waits does."""
        return number < 0 or (self.landed.number - number) % COUNT < COUNT // 2


@pytest.mark.parametrize("seed", range(6))
def test_a_kernel_that_waited_reads_the_promised_expert(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Transfers are issued, cancelled and used at random, over both roads in turns."""
    run = Run(monkeypatch, seed)
    gpu, copies, link = run.gpu, run.copies, run.link
    pick = gpu.random
    pending = {}
    keys = dict.fromkeys(range(SLOTS), -1)
    num_waits = 0
    for turn in range(200):
        if turn % 50 == 0:
            if turn:
                copies.end(pending.values())
                slot = pick.randrange(SLOTS)
                link.collect_all([pending.pop(slot)] if slot in pending else [])
                run.read(slot, keys[slot])
                pending[slot] = link.issue(turn % 16, run.slots[slot], urgency=PREFETCH)
                keys[slot] = turn % 16
            copies.begin(pending.values())
        slots = pick.sample(range(SLOTS), pick.choice((1, 2)))
        if pick.random() < 0.6:
            for slot in slots:
                if slot in pending:
                    copies.cancel(pending.pop(slot))
            keys |= (new := {slot: pick.randrange(SHAPE.num_keys) for slot in slots})
            issued = run.issue(new, pick.choice((DEMAND, PREFETCH)))
            pending.update(zip(new, issued, strict=True))
            copies.pump()
        else:
            number = copies.number_behind([pending.pop(slot) for slot in slots if slot in pending])
            gpu.compute.add(lambda: None, lambda number=number: run.has_come(number))
            for slot in slots:
                run.read(slot, keys[slot])
            gpu.run(lambda: not gpu.compute.queue)
            assert not gpu.compute.queue, "no queued work leads to this number"
            num_waits += number >= 0
            if pick.random() < 0.5:
                copies.told(run.landed.number, 0.5)
    gpu.run()
    assert run.seen and all(key in (-1, found) for key, found in run.seen)
    assert num_waits > 20 and link.drain_stalls() > 0
    link.close()


def test_a_demand_waits_for_two_pieces_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the stream keeps to the rate that was measured; what is left of the prefetch comes
    once it is used, and a cancelled one no further."""
    run = Run(monkeypatch, 0)
    now_s = 100.0
    monkeypatch.setattr(cuda_flags.time, "perf_counter", lambda: now_s)
    run.copies.begin(())
    used, dropped = run.issue({0: 3, 1: 4}, PREFETCH)
    run.copies.pump()
    assert run.gpu.num_copied == 2 * PIECE
    run.copies.pump()
    assert run.gpu.num_copied == 2 * PIECE, "both are still under way"
    run.copies.cancel(dropped)
    assert run.copies.number_behind([used]) == 1 and run.gpu.num_copied == 64
    now_s += 1.0
    run.copies.pump()
    assert run.gpu.num_copied == 64
    run.issue({2: 5, 3: 6}, PREFETCH)
    run.copies.pump_all()
    assert run.gpu.num_copied == 3 * 64
    run.copies.end(())
    run.link.close()


def test_its_bytes_and_stalls_are_told_with_those_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, 0)
    run.link.copy_s, run.link._copied_nbytes = 2.0, 200
    run.copies.begin(())
    run.issue({0: 3}, DEMAND)
    run.copies.told(0, 0.25)
    assert run.link.copy_s == pytest.approx(2.64), "64 bytes at 100 a second"
    assert run.link.drain_stalls() == 0.25 and run.link.drain_stalls() == 0
    assert run.link.conditions()["measured_gbps"] == pytest.approx(1e-7)
    run.link.close()

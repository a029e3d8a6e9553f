"""Experts from disk in a whole session: logits equal the plain model's to the bit, and no cancelled
expert is read."""

import os
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from runtime.backends.torch_backend import TorchBackend
from runtime.links.link import (
    DEMAND,
    PREFETCH,
    READS_IN_FLIGHT,
    READS_PAST_CACHE,
    DiskLink,
    ThreadTransfer,
)
from runtime.model.files import direct_io
from runtime.model.files.direct_io import DirectFile
from runtime.model.files.expert_store import DiskStore
from runtime.model.layout import ExpertStore, aligned
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from runtime.tiers.slow import SlowTier
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY, save
from tests.runtime.model.test_expert_store import direct_or_skip
from tests.runtime.session.test_session import plain_model

PROMPT = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["hub", "fused"])
@pytest.mark.parametrize("link", ["disk", "direct"])
def test_logits_are_the_plain_models_with_prefetches_that_come_late_and_are_cancelled(
    checkpoint: Checkpoint, layout: str, link: str
) -> None:
    folder = checkpoint("olmoe", layout)
    plain = plain_model(folder)
    opened = open_model(str(folder))
    direct_or_skip(opened.store)
    policies = {"prefetch": "next_gate:overfetch=2"}
    settings = Settings(budget="5x", scope="global", link=link, policies=policies, window="9KiB")
    with Session(opened, settings) as session, torch.inference_mode():
        ours = session.forward(PROMPT)
        theirs = plain(PROMPT, use_cache=True)
        assert torch.equal(ours.logits, theirs.logits)
        mine = ours.past_key_values
        past = theirs.past_key_values
        for token in range(3, 15):
            one = torch.tensor([[token]])
            step = session.forward(one, past=mine)
            right = plain(one, past_key_values=past)
            assert torch.equal(step.logits, right.logits)
            mine = step.past_key_values
            past = right.past_key_values
        receipt = session.receipt()["link"]
        assert session.controller.counters.totals()["prefetches"] > 0
    assert receipt["page_cache"] == {"disk": "used", "direct": "bypassed"}[link]
    assert receipt["reads_in_flight"] == {"disk": READS_IN_FLIGHT, "direct": READS_PAST_CACHE}[link]


def test_a_cancelled_transfer_is_never_read(checkpoint: Checkpoint) -> None:
    """One read is held while seven prefetches queue behind it and are cancelled."""
    opened = open_model(str(checkpoint("olmoe")))
    gate = threading.Event()
    read = []

    class Held:
        def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> None:
            read.append((layer, expert))
            gate.wait()
            opened.store.read(layer, expert, out)

    link = DiskLink(Held(), opened.shape)
    slots = torch.zeros(8, opened.shape.expert_nbytes, dtype=torch.uint8)
    first, *others = [link.issue(key, slots[key], urgency=PREFETCH) for key in range(8)]
    for transfer in others:
        link.cancel(transfer)
    gate.set()
    link.collect(first)
    link.close()
    assert read == [(0, 0)] and not slots[1:].any()


def test_replicas_are_not_read_past_the_page_cache() -> None:
    with pytest.raises(BadUsage, match="replicas come through it: use disk"):
        ExpertStore.direct(object())


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="this system counts no bytes of the device"
)
def test_a_cold_expert_costs_the_device_its_own_bytes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Up to whole pages: readahead would have read neighbours as well."""
    from tools.bench.measuring import drop, read_nbytes

    folder = checkpoint("olmoe", "hub", "bfloat16")
    store = open_model(str(folder)).store
    out = torch.empty(1 << 20, dtype=torch.uint8)
    os.sync()
    drop(folder)
    before = read_nbytes()
    store.read(1, 4, out)
    num_read = read_nbytes() - before
    # three tensors, each begun and ended inside a page
    assert num_read <= store.layout.nbytes + 3 * 2 * 4096


def opened_with_warm_cache(folder: Path) -> MoeModel:
    """Open a model and read every expert, so that the page cache has them all."""
    opened = open_model(str(folder))
    for key in range(opened.shape.num_keys):
        opened.store.read(
            *divmod(key, opened.shape.num_experts), aligned(opened.shape.expert_nbytes)
        )
    if not opened.store.read_kept(0, 0, aligned(opened.shape.expert_nbytes)):
        pytest.skip("this system does not tell what the page cache has")
    return opened


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_experts_in_the_page_cache_are_copied_at_once(checkpoint: Checkpoint, layout: str) -> None:
    """No transfer is handed to a thread, whose reads would fail."""

    class Refuses(SlowTier):
        def read(self, *_: object, **__: object) -> None:
            raise AssertionError("read by a thread")

    opened = opened_with_warm_cache(checkpoint("olmoe", layout))
    source = Refuses.plain(opened.store)
    shape = opened.shape
    link = DiskLink(source, shape, kept=source.stores)
    slot = aligned(shape.expert_nbytes)
    expected = aligned(shape.expert_nbytes)
    for key in range(shape.num_keys):
        transfer = link.issue(key, slot.zero_(), urgency=DEMAND)
        assert link.has_landed(transfer)
        link.collect(transfer)
        opened.store.read(*divmod(key, shape.num_experts), expected)
        assert torch.equal(slot, expected)
    assert link.drain_stalls() == 0 and link.conditions()["measured_gbps"] > 0
    with pytest.raises(AssertionError, match="by a thread"):
        # a prefetch goes to a thread: compute continues meanwhile
        link.collect(link.issue(0, slot, urgency=PREFETCH))
    link.close()
    with pytest.raises(RuntimeError, match="link is closed"):
        link.issue(0, slot, urgency=DEMAND)


def test_uncached_and_unchecked_experts_are_left_to_threads(tmp_path: Path) -> None:
    folder = save("olmoe", "fused", tmp_path)
    opened = opened_with_warm_cache(folder)
    out = aligned(opened.shape.expert_nbytes)
    assert not open_model(str(folder)).store.read_kept(0, 0, out), "its numbers may be NaN"
    assert not open_model(str(folder), dtype=torch.bfloat16).store.read_kept(0, 0, out), (
        "it is converted"
    )
    assert not direct_or_skip(opened.store).read_kept(0, 0, out)
    os.truncate(folder / "model.safetensors", 30_000)
    assert not opened.store.read_kept(opened.shape.num_layers - 1, 0, out), (
        "the file ends before it"
    )


def test_past_the_page_cache_a_tokens_experts_are_computed_in_one_call(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call computes all experts of a decoded token, although they land at different times."""
    counts: list[int] = []
    plain_add = TorchBackend.add
    plain_read = DiskLink._read

    def add(self: TorchBackend, places: list) -> None:
        counts.append(len(places))
        plain_add(self, places)

    def read(self: DiskLink, transfer: ThreadTransfer, out: torch.Tensor) -> None:
        time.sleep(5e-3 * (next(begun) % opened.shape.top_k))
        plain_read(self, transfer, out)

    monkeypatch.setattr(TorchBackend, "add", add)
    monkeypatch.setattr(DiskLink, "_read", read)
    monkeypatch.setattr(DiskStore, "read_kept", lambda *_: False)
    opened = open_model(str(checkpoint("olmoe")))
    direct_or_skip(opened.store)
    with Session(
        opened, Settings(budget=f"{opened.shape.top_k}x", scope="global", link="direct")
    ) as session:
        begun = count()
        session.forward(PROMPT[:, :1])
    assert counts == [opened.shape.top_k] * opened.shape.num_layers


def test_reads_that_begin_on_borders_need_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks are read in place. Their tail, and reads that begin elsewhere in file or memory,
    use a buffer."""
    path = tmp_path / "some"
    content = torch.randint(256, (30_000,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    try:
        file = DirectFile(path)
    except BadInput:
        pytest.skip("this file system has no reads past the page cache")
    buffered = []
    plain = direct_io._thread_buffer
    monkeypatch.setattr(
        direct_io, "_thread_buffer", lambda nbytes: buffered.append(nbytes) or plain(nbytes)
    )
    for offset, start, by_buffer in ((8192, 0, [4096]), (8192, 64, [12288]), (8200, 0, [12288])):
        slot = aligned(4096 + 9000)[start : start + 9000].zero_()
        buffered.clear()
        file.read_into(offset, [memoryview(slot.numpy())])
        assert torch.equal(slot, content[offset : offset + 9000]) and buffered == by_buffer
    with pytest.raises(BadInput, match="ends before byte"):
        file.read_into(24576, [memoryview(aligned(9000).numpy())])

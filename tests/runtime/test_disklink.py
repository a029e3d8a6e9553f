"""Experts from disk in a whole session: the plain model's bits, whatever is in flight; nothing is read in vain."""

import os
import threading
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadUsage
from runtime.disklink import READS_IN_FLIGHT, DiskLink
from runtime.link import PREFETCH
from runtime.model import open_model
from runtime.session import Session, Settings
from runtime.tiers import direct
from tests.conftest import Checkpoint
from tests.families import VOCABULARY
from tests.runtime.test_session import plain_model
from tests.runtime.test_weights import direct_or_skip

PROMPT = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["hub", "fused"])
@pytest.mark.parametrize("link", ["disk", "direct"])
def test_logits_are_the_plain_models_with_prefetches_that_come_late_and_are_cancelled(
    checkpoint: Checkpoint, layout: str, link: str
) -> None:
    folder = checkpoint("olmoe", layout)
    plain, opened = plain_model(folder), open_model(str(folder))
    direct_or_skip(opened.store)
    policies = {"prefetch": "next_gate:overfetch=2"}
    settings = Settings(budget="5x", scope="global", link=link, policies=policies, window="9KiB")
    with Session(opened, settings) as session, torch.inference_mode():
        ours, theirs = session.forward(PROMPT), plain(PROMPT, use_cache=True)
        assert torch.equal(ours.logits, theirs.logits)
        mine, past = ours.past_key_values, theirs.past_key_values
        for token in range(3, 15):
            one = torch.tensor([[token]])
            step, right = session.forward(one, past=mine), plain(one, past_key_values=past)
            assert torch.equal(step.logits, right.logits)
            mine, past = step.past_key_values, right.past_key_values
        told = session.receipt()["link"]
        assert session.controller.counters.totals()["prefetches"] > 0
    assert told["page_cache"] == {"disk": "used", "direct": "bypassed"}[link]
    assert told["reads_in_flight"] == READS_IN_FLIGHT


def test_what_has_been_cancelled_is_never_read(checkpoint: Checkpoint) -> None:
    """One read is held up while seven prefetches queue behind it and are cancelled."""
    opened = open_model(str(checkpoint("olmoe")))
    gate, read = threading.Event(), []

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
        direct(object())


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="nobody counts bytes of the device here")
def test_a_cold_expert_costs_the_device_its_own_bytes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """To the page; readahead would have brought its neighbours."""
    from tools.disk_way import drop, read_nbytes

    folder = checkpoint("olmoe", "hub", "bfloat16")
    store, out = open_model(str(folder)).store, torch.empty(1 << 20, dtype=torch.uint8)
    os.sync()
    drop(folder)
    before = read_nbytes()
    store.read(1, 4, out)
    came = read_nbytes() - before
    assert came <= store.layout.nbytes + 3 * 2 * 4096  # three tensors, each begun and ended inside a page

"""Experts spread over several devices, here parts of one: the logits do not change, live run and
replay agree, and an expert is resident only on its own device."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage
from runtime.control.plan import Place
from runtime.devices import spread_over
from runtime.links.link import DiskLink
from runtime.links.per_device import LinkPerDevice
from runtime.model.open import open_model
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tests.runtime.replay.test_replay import artefacts, live_and_replayed
from tools.gpu.checks.made_replicas import made
from tools.torments.engine_checks import check
from tools.torments.lossless import Model, differs, said

pytestmark = pytest.mark.slow

PACED = {"link": "300MB/s+5us", "near": "1GB/s", "window": "2KiB"}
AHEAD = "next_gate:distance=2,overfetch=0.5,through=yes"
LOSSLESS = [
    *(
        (name, {})
        for name in (
            "on-demand",
            "near",
            "mixtral-offloading",
            "specmd",
            "horizon",
            "monde",
            "full",
        )
    ),
    ("on-demand", {"prefetch": AHEAD, "eviction": "lcp", "miss": "qstar:ratio=0.2"}),
]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[Model]:
    made = Model(Path(checkpoint("olmoe", "hub", "float32")), "olmoe")
    yield made
    made.opened.store.close()


def is_plain(session: Session, model: Model) -> None:
    for request in model.requests[1:4]:
        assert not differs(said(session, request), request.logits)
        check(session, "a request")


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(
    ("preset", "policies"), LOSSLESS, ids=lambda given: given if isinstance(given, str) else None
)
def test_every_spread_gives_the_plain_models_logits(
    preset: str, policies: dict[str, str], devices: int, model: Model
) -> None:
    scope = "global" if preset in ("specmd", "horizon") else "layer"
    settings = Settings(preset, policies, budget="60%", scope=scope, devices=devices, **PACED)
    with Session(model.opened, settings) as session:
        is_plain(session, model)
        by_device = list(session.receipt()["devices"].values())
    assert len(by_device) == devices and all(
        device["resident"] <= device["slots"] for device in by_device
    )
    assert all(device["resident"] and device["requests"] for device in by_device)


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("preset", ["full", "near"])
def test_tokens_that_nothing_is_decided_for_are_counted_by_device(
    preset: str, devices: int, model: Model
) -> None:
    """Compiled kernels take the whole layers of a model that fits."""
    settings = Settings(preset, budget="100%", devices=devices, experts="fused")
    with Session(model.opened, settings) as session:
        session.record()
        said(session, model.requests[0])
        recorded = [device["requests"] for device in session.controller.by_device()]
    with Session(model.opened, settings) as session:
        said(session, model.requests[0])
        check(session, "a request")
        assert [device["requests"] for device in session.controller.by_device()] == recorded


def test_devices_that_share_no_memory_have_links_and_copies_of_their_own(model: Model) -> None:
    """The code for several GPUs, on parts of one CPU: tokens are copied there and outputs back,
    over two links."""
    with Session(
        model.opened, Settings(preset="specmd", budget="60%", devices=2, link="disk", window="2KiB")
    ) as session:
        first = session.parts.tiers.link
        other = DiskLink(session.parts.tiers.slow, model.opened.shape)
        session.parts.slots.are_apart = True
        steps = session.engine.steps
        steps.backend._batched = None
        steps.can_skip_planning = False
        steps.link = both = LinkPerDevice(session.parts.partitions, [first, other])
        is_plain(session, model)
        counts = session.receipt()["devices"]["cpu part 1"]
        moved = counts["demand_bytes"] + counts["prefetch_bytes"]
        assert 0 < other._copied_nbytes <= moved, "cancelled transfers copied nothing"
        session.engine.clear()
        assert not difference(session, model), "both links forget a pass that was broken off"
        both.close()
        with pytest.raises(RuntimeError, match="closed"):
            both.issue(1, session.parts.slots[0], urgency=0)


def difference(session: Session, model: Model) -> str:
    return differs(said(session, model.requests[1]), model.requests[1].logits)


@pytest.mark.parametrize(
    ("devices", "preset", "policies"),
    [
        (2, "on-demand", {}),
        (3, "on-demand", {"prefetch": AHEAD, "eviction": "lcp", "miss": "qstar:ratio=0.2"}),
        (2, "horizon", {"prefetch": "frequency:distance=2"}),
        (3, "specmd", {}),
        (2, "near", {}),
        (3, "moepic", {"residency": "split:theta=0.5,passing=6"}),
        (2, "buddymoe", {"miss": "buddy:kappa=0.5"}),
        (3, "context-aware", {}),
        (2, "adapmoe", {}),
        (3, "shadow", {}),
        (2, "fmoe", {}),
        (3, "full", {}),
    ],
)
def test_live_equals_replay(
    checkpoint: Checkpoint, tmp_path: Path, devices: int, preset: str, policies: dict[str, str]
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    known = artefacts(opened.shape, made(opened, tmp_path))
    settings = Settings(
        preset, policies, budget="80%", window="5KiB", link="1GB/s", devices=devices
    )
    live, again = live_and_replayed(opened, settings, known, tmp_path / "trace.parquet")
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert np.array_equal(live.cache.state, again.cache.state)
    assert live.by_device() == again.by_device()
    for name in (
        "requests",
        "hits",
        "late",
        "misses",
        "evictions",
        "demand_bytes",
        "prefetch_bytes",
    ):
        assert sum(device[name] for device in live.by_device()) == live.counters.totals()[name]
    opened.store.close()


def test_validate_notices_an_expert_on_another_device(model: Model) -> None:
    with Session(model.opened, Settings(budget="60%", devices=2, link="disk")) as session:
        said(session, model.requests[1])
        session.validate()
        cache = session.controller.cache
        one, other = (
            next(p for p in cache.places if p and p.key % 8 % 2 == device) for device in (0, 1)
        )
        cache.places[one.key] = Place(one.key, other.slot)
        cache.places[other.key] = Place(other.key, one.slot)
        with pytest.raises(AssertionError):
            session.validate()
        cache.places[one.key] = one
        cache.places[other.key] = other
        session.parts.slots.device_of[one.slot] = 1
        with pytest.raises(
            AssertionError, match=f"key {one.key} of device 0 is in slot {one.slot} of device 1"
        ):
            session.validate()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"devices": 9}, "a layer has 8 experts, so give 1 to 8"),
        (
            {"devices": 4, "budget": "7x"},
            "one expert a layer on each of 4 devices is the least: give at least 8x",
        ),
        (
            {"devices": 4, "budget": "5x", "preset": "moepic"},
            "leaves device 3 without a slot for some of its experts",
        ),
        (
            {"devices": 2, "preset": "moepic", "reconfigure_every": 100},
            "on one device only: leave out --devices",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(
    settings: dict[str, object], problem: str, model: Model
) -> None:
    with pytest.raises(BadUsage, match=problem):
        Session(model.opened, Settings(**{"budget": "60%", "link": "disk"} | settings))


def test_gpus_are_taken_before_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = [torch.device("cuda", number) for number in range(4)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert spread_over(cuda[0], 3) == (cuda[0], cuda[1], cuda[2])
    assert spread_over(cuda[2], 4) == (cuda[2], cuda[0], cuda[1], cuda[3])
    assert spread_over(cuda[1], 5) == (cuda[1],) * 5
    assert spread_over(torch.device("cpu"), 2) == (torch.device("cpu"),) * 2

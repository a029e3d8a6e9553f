"""Sessions whose decoded tokens the device decides say what the plain model says, and count as the
simulator does."""

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.backends import host_copy
from runtime.control.on_device import LAST_USE, SlotTables
from runtime.engine.device_road import DeviceRoad
from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton
from tests.runtime.session.test_published_fused import published

pytestmark = pytest.mark.slow

INTERPRETED = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from runtime.backends.triton import triton_backend
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.kernels.gpu import published
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session, Settings
gated._ROWS, gated._COLUMNS = 32, 64
published._BLOCKS = dict.fromkeys(published._BLOCKS, (128, 128))
CpuBackend.suits = staticmethod(lambda opened, **_: False)
triton_backend._runs_on = lambda device: True  # the interpreter runs the kernels on the CPU
SETTINGS = Settings(budget="60%", link="1GB/s", experts="fused", decide="device", window="100KB")
AHEAD = {"prefetch": "next_gate", "eviction": "late_horizon"}
"""
SAID = """
from tools.bench.decoding.resident import plain_model
ids = torch.randint(3, 96, (1, 16), generator=torch.Generator().manual_seed(2))

def said(forward):
    logits = []
    for first, last in ((0, 6), (0, 3), (4, 5)):  # prompts, each with tokens after it; the last has one token
        now = forward(ids[:, first:last], None)
        logits.append(now.logits[0])
        for position in range(last, last + 4):
            now = forward(ids[:, position : position + 1], now.past_key_values)
            logits.append(now.logits[0])
    return torch.cat(logits)

@torch.inference_mode()
def plainly(folder):
    plain = plain_model(Path(folder))
    return said(lambda ids, past: plain(input_ids=ids, past_key_values=past, use_cache=True))

def through(opened, settings):
    with Session(opened, settings) as session:
        return said(lambda ids, past: session.forward(ids, past=past))

for folder, is_published in json.loads(sys.argv[1]):
    opened = open_model(folder, dtype=torch.float32)
    theirs = through(opened, Settings(link="1GB/s")) if is_published else plainly(folder)
    ways = {name: [] for name in ("said", "hits", "misses", "decide")}
    for policies in ({}, AHEAD):
        with Session(opened, replace(SETTINGS, policies=policies)) as session:
            ways["said"].append(said(lambda ids, past: session.forward(ids, past=past)))
            session.validate()
            totals = session.controller.counters.totals(first_pass=1)
        ways["decide"].append(session.receipt()["decide"])
        for name in ("hits", "misses"):
            ways[name].append(totals[name])
    ours, ahead = ways.pop("said")
    error = (ours - theirs).abs().max() / theirs.abs().max()
    print(json.dumps([error.item(), torch.equal(ours, ahead), ways]))
"""
REPLAYED = """
from tests.runtime.replay.test_replay import live_and_replayed
opened = open_model(sys.argv[1])
settings = replace(SETTINGS, policies=json.loads(sys.argv[3]))
live, again = live_and_replayed(opened, settings, Artefacts(), Path(sys.argv[2]))
passes = zip(live.counters.passes, again.counters.passes, strict=True)
print(len(live.counters.passes), sum(bool((one != other).any()) for one, other in passes))
print(int((live.cache.state != again.cache.state).sum()), live.now == again.now)
totals = live.counters.totals(first_pass=1)
print(int(0 < totals["evictions"] and 0 < totals["misses"] < totals["hits"]))
"""

FAILED = """
from runtime.kernels.gpu import decide
ids = torch.arange(3, 13)[None]
opened, fill, calls = open_model(sys.argv[1]), decide.fill, []

def failing(*args, **own):
    calls.append(own["first_key"])
    if len(calls) == 2:  # in the second layer
        raise RuntimeError("no such memory")
    fill(*args, **own)

def decoded(session):
    past, logits = session.forward(ids[:, :6]).past_key_values, []
    for position in range(6, 10):
        now = session.forward(ids[:, position : position + 1], past=past)
        past = now.past_key_values
        logits.append(now.logits)
    return torch.cat(logits)

with Session(opened, Settings(link="1GB/s")) as session:
    theirs = decoded(session)
with Session(opened, SETTINGS) as session:
    decoded(session)
    decide.fill = failing
    try:
        session.forward(ids[:, :1])
    except RuntimeError as error:
        print(error)
    decide.fill = fill
    session.forward(ids[:, :1])  # into an empty cache
    print(session.num_passes, session.controller.counters.totals(first_pass=5))
    session.validate()
    print(bool((decoded(session) - theirs).abs().max() < 5e-6 * theirs.abs().max()))
"""

AHEAD = {"prefetch": "next_gate:least=0.1"}
BOTH = {"eviction": "late_horizon", "prefetch": "next_gate"}


@needs_triton
def test_sessions_say_what_the_plain_model_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Prompts, which the host decides, with tokens after them, which the device does, on demand and
    with prefetches: to the same bits, whichever experts a layer computes first. A published format,
    which transformers does not read here, is held against torch's own products of the dequantised
    experts."""
    cases = [(str(checkpoint(family)), False) for family in ("olmoe", "qwen3_moe")]
    cases.append((str(published("mxfp4", tmp_path)), True))
    results = list(map(json.loads, interpret(INTERPRETED + SAID, json.dumps(cases))))
    assert len(results) == len(cases)
    for (folder, _), (error, are_equal, ways) in zip(cases, results, strict=True):
        assert error < 5e-6 and are_equal, (folder, error)
        assert all(ways["hits"]) and all(ways["misses"]) and ways["decide"] == ["device"] * 2


@needs_triton
@pytest.mark.parametrize("policies", [BOTH, AHEAD], ids=["late_horizon, next_gate", "lru, likely"])
def test_the_simulator_replays_it(
    policies: dict[str, str], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Also batches between, which the host decides, and a `generate` on its own thread."""
    passes, state, figures = interpret(
        INTERPRETED + REPLAYED,
        str(checkpoint("olmoe")),
        str(tmp_path / "trace.parquet"),
        json.dumps(policies),
    )
    assert passes == "11 0" and state == "0 True" and figures == "1"


@needs_triton
def test_a_token_that_fails_empties_the_cache_and_no_more(checkpoint: Checkpoint) -> None:
    error, counts, is_right = interpret(INTERPRETED + FAILED, str(checkpoint("olmoe")))
    assert error == "no such memory" and is_right == "True"
    assert (
        counts.startswith("6 {'requests': 4, 'hits': 0, 'late': 0, 'misses': 4,")
        and "'evictions': 0" in counts
    )


class LateDevice:
    """Sends its letters only when the host waits for one, and then all that were queued."""

    def __init__(self) -> None:
        self.queued: deque[torch.Tensor] = deque()

    def send_next(
        self, values: torch.Tensor, number: torch.Tensor, words: torch.Tensor, count: int
    ) -> None:
        self.queued.append(values.clone())
        self.number = number
        self.letters = words.view(count, -1)

    def wait_for(self, letter: np.ndarray, number: int, device: torch.device) -> None:
        while self.queued:
            self.number += 1
            here = self.letters[int(self.number) % len(self.letters)]
            here[0] = self.number
            here[1:] = self.queued.popleft()
        assert letter[0] == number, (
            f"letter {number} was overwritten by {letter[0]} before it was read"
        )


class Books:
    """Those of one layer of two experts in two slots; `counted` has the loads of each token."""

    first_slots = (0,)
    num_slots = (2,)
    num_named = 0
    kind = LAST_USE

    def __init__(self) -> None:
        self.counters = SimpleNamespace()
        self.counted = []
        self.num_ended = 0

    def hand_over(self) -> SlotTables:
        return SlotTables(*(np.zeros((1, 2), np.int32) for _ in range(4)))

    def clock(self) -> int:
        return self.num_ended

    def ended(self) -> int:
        self.num_ended += 1
        return self.num_ended

    def count(
        self, token: int, loads: np.ndarray, evictions: np.ndarray, *, wanted: np.ndarray
    ) -> None:
        self.counted.append((token, int(loads[0]), int(evictions[0])))


def test_counters_are_read_before_the_next_letter_overwrites_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the device is as far behind as the host lets it be."""
    device = LateDevice()
    books = Books()
    monkeypatch.setattr(host_copy, "kernels", lambda name: device)
    monkeypatch.setattr(host_copy, "wait_for", device.wait_for)
    words = torch.zeros(4, dtype=torch.uint8)
    slots = SimpleNamespace(device=torch.device("cpu"), arena=words, starts=[0, 0])
    slow = SimpleNamespace(stores={FULL_BITS: SimpleNamespace(buffer=words)})
    opened = SimpleNamespace(shape=Shape(1, 2, 1, 4))
    output = SimpleNamespace(starts=lambda of: [0 for _ in of])
    road = DeviceRoad(opened, books, SimpleNamespace(slots=slots, slow=slow), output, lambda: None)
    num_tokens = 3 * host_copy.NumberedLetters.COUNT
    for token in range(num_tokens):
        road.begin_token()
        # as its kernels add up loads and evictions
        road._cache.told.add_(torch.tensor([token, 1, 2], dtype=torch.int32))
        road.end_pass()
    assert len(books.counted) > num_tokens // 2  # before they are asked for
    road.catch_up()
    assert books.counted == [(token + 1, token, 1) for token in range(num_tokens)]

"""Passes of a token and drafts are graphs of their own width: sessions that replay them say what the
plain model says, and count and decide as others do; by a stand-in for CUDA graphs."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import families
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
BOUND = 5e-6  # of the largest logit, in float32
VERIFIED = """
import json, sys
import pytest, torch
from runtime.engine import captured_tokens
from runtime.kernels.gpu.dense.decoder import TritonDecoder
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.session import build
from runtime.session.session import Session, Settings
from tests.helpers import recorded_graphs
from tools.gpu.faked import counted_gpu
from tools.gpu.faked.counted_gpu import counts
from tools.gpu.probes.verified import verify
gated._ROWS, gated._COLUMNS = 32, 64
captured_tokens._LEAST, captured_tokens._SPARE = 64, 1
folder, decide, dense, settings = json.loads(sys.argv[1])
ids = torch.randint(3, 96, (1, 64), generator=torch.Generator().manual_seed(2))
# tokens of each pass, and how many of them stay: a pass of each width is launched, one is captured
PASSES = [(1, 1), (1, 1), (2, 1), (4, 3), (2, 2), (4, 1), (4, 4), (1, 1), (2, 1)]
opened = open_model(folder)
settings |= {"link": "1GB/s"}

def say(session):
    now = session.forward(ids[:, :9])
    past, read, said, replayed = now.past_key_values, 9, [], None
    for turn, (count, stay) in enumerate(PASSES):
        if turn == 6:  # all widths are captured
            counts.clear(), recorded_graphs.counts.clear()
            replayed = session.num_passes
        tokens = ids[:, read : read + count].clone()
        tokens[0, stay:] += 1  # the others are wrong
        said.append(verify(session, past, tokens, stay))
        read += stay
    return torch.cat(said), [layer.keys.clone() for layer in past.layers], replayed

with Session(opened, Settings(**settings)) as session:
    theirs, their_keys, _ = say(session)
    their_passes = session.controller.counters.passes
    cache = session.controller.cache.state
recorded_graphs.install(pytest.MonkeyPatch())
counted_gpu.install()
if dense:
    build.TritonDecoder = TritonDecoder
settings |= {"experts": "fused", "decide": decide, "draft": "ngram:3"}
with counted_gpu.with_mailbox(Session(opened, Settings(**settings))) as session:
    ours, keys, first = say(session)
    asked = dict(counts | recorded_graphs.counts)
    session.validate()
    passes, receipt = session.controller.counters.passes, session.receipt()
    moved = session.controller.counters.totals(first_pass=first)
    is_same = bool((session.controller.cache.state == cache).all())
is_full = settings.get("preset") == "full"  # a GPU loads all before the first pass
is_same |= is_full
rows = slice(1) if is_full else slice(None)
alike = all(bool((one == other)[rows].all()) for one, other in zip(passes, their_passes, strict=True))
pairs = [(ours, theirs), *zip(keys, their_keys, strict=True)]
errors = [((one - other).abs().max() / other.abs().max()).item() for one, other in pairs]
loads = moved["fetched"] + moved["prefetches"]
print(json.dumps([max(errors), alike, is_same, receipt["captured"], asked, loads, receipt["compiled"]]))
"""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a session that replays verifications did: graphs, calls of the driver over the last three
    passes, loads of those."""

    captured: dict[str, object]
    asked: dict[str, int]
    loads: int
    compiled: dict[str, object]


def verified(folder: Path, family: str, *, decide: str = "host", dense: bool = False, **settings):
    # as many slots as four tokens may want
    fields = {"num_local_experts": 16} if family == "gpt_oss" else {"num_experts": 16}
    fields |= {"sliding_window": 6} if family == "gpt_oss" else {}
    saved = families.save(family, "hub", folder, fields=fields)
    (line,) = interpret(VERIFIED, json.dumps([str(saved), decide, dense, settings]))
    error, alike, is_same, *found = json.loads(line)
    assert error < BOUND and alike and is_same, line
    return Verified(*found)


def of_device(eviction: str) -> dict[str, object]:
    return {"budget": "60%", "decide": "device", "policies": {"eviction": eviction}}


NEXT = {"prefetch": "next_gate"}
WAYS = {
    "resident, dense kernels": ("olmoe", {"preset": "full", "dense": True}, "resident"),
    "device, lru": ("olmoe", of_device("lru"), "device"),
    "device, lfu": ("olmoe", of_device("lfu"), "device"),
    "device, late_horizon": ("olmoe", of_device("late_horizon"), "device"),
    "host, a window": ("gpt_oss", {"budget": "60%", "policies": NEXT}, "host"),
    "host, near": ("gpt_oss", {"budget": "60%", "preset": "near"}, "host"),
}


@pytest.mark.parametrize(("family", "settings", "road"), WAYS.values(), ids=list(WAYS))
def test_verifications_are_the_plain_models(
    family: str, settings: dict, road: str, tmp_path: Path
) -> None:
    """Logits, keys after rejected drafts, counters and the cache's state. A replayed pass of any
    width is one launch, and for each load one copy and at most one number behind it."""
    found = verified(tmp_path, family, **settings)
    captured = found.captured
    assert captured["road"] == road
    assert captured["why_not"] is None and captured["wide_why_not"] == {}
    assert captured["widths"] == {"2": 2, "4": 2} and captured["captures"] == 3
    asked = found.asked
    asked.pop("host waits", None)
    assert asked.pop("flags", 0) <= found.loads
    loads = {"copies of experts": found.loads} if road == "host" and found.loads else {}
    assert asked == {"graphs": 3} | loads
    if settings.get("dense"):
        assert found.compiled["attentions"] == found.compiled["blocks"] == 2

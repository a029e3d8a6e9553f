"""Sessions that replay decoded tokens as graphs say what the plain model says, and count as others
do; by a stand-in for CUDA graphs."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import Checkpoint
from tests.helpers import families
from tests.helpers.triton_process import interpret, needs_triton
from tools.make.families import tiny

pytestmark = [needs_triton, pytest.mark.slow]
# of the largest logit, in float32: attention is summed over a longer row, whose end is hidden
BOUND = 5e-6
BEGUN = """
import json, sys
import pytest, torch
from tests.helpers import recorded_graphs
from tools.gpu.faked import counted_gpu
from runtime.engine import captured_tokens
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
gated._ROWS, gated._COLUMNS = 32, 64
captured_tokens._LEAST, captured_tokens._SPARE = 16, 1
ids = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(2))

def on_gpu():
    recorded_graphs.install(pytest.MonkeyPatch())
    counted_gpu.install()

def decode(session, past, positions):
    logits = []
    for position in positions:
        now = session.forward(ids[:, position : position + 1], past=past)
        past = now.past_key_values
        logits.append(now.logits[0])
    return past, logits

def say(session):
    # Two sequences in turns, a longer piece between, and more tokens than there was room for.
    one, other = (session.forward(ids[:, first:last]).past_key_values for first, last in ((0, 5), (3, 5)))
    said = []
    for positions in (range(5, 8), range(8, 11), range(14, 20)):
        one, logits = decode(session, one, positions)
        said += logits
        other, logits = decode(session, other, positions[:2])
        said += logits
        if positions[0] == 8:
            now = session.forward(ids[:, 11:14], past=one)
            one = now.past_key_values
            said.append(now.logits[0])
    return torch.cat(said), [layer.keys for layer in (*one.layers, *other.layers)]

def error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
"""
COMPARED = """
folder, decide, settings = json.loads(sys.argv[1])
opened = open_model(folder)
settings |= {"link": "1GB/s", "window": f"{4 * opened.shape.expert_nbytes}B"}
with Session(opened, Settings(**settings)) as session:
    theirs, their_keys = say(session)
    their_passes = session.controller.counters.passes
on_gpu()
with counted_gpu.with_mailbox(Session(opened, Settings(**settings, experts="fused", decide=decide))) as session:
    ours, keys = say(session)
    session.validate()
    passes, receipt = session.controller.counters.passes, session.receipt()
rows = slice(1) if settings.get("preset") == "full" else slice(None)  # a GPU loads all experts before the first pass
alike = [bool((one == other)[rows].all()) for one, other in zip(passes, their_passes, strict=True)]
key_error = max(error(*pair) for pair in zip(keys, their_keys, strict=True))
print(json.dumps([error(ours, theirs), key_error, all(alike), receipt["captured"]]))
"""


NEXT = {"prefetch": "next_gate"}
WAYS = {
    "decided by the device": (
        "olmoe",
        "device",
        {"budget": "60%", "policies": {"eviction": "lfu", **NEXT}},
    ),
    "by the device and the host": (
        "olmoe",
        "device",
        {"budget": "60%", "policies": {"eviction": "late_horizon"}},
    ),
    "all resident": ("deepseek_v2", "resident", {"preset": "full"}),
    "decided by the host, with a window": ("gpt_oss", "host", {"budget": "60%", "policies": NEXT}),
    "by the host, horizon": (
        "olmoe",
        "host",
        {"budget": "60%", "policies": {"eviction": "horizon", **NEXT}},
    ),
    "by the host, near": ("gpt_oss", "host", {"budget": "60%", "preset": "near"}),
    "by the host, near and loads": (
        "olmoe",
        "host",
        {"budget": "60%", "policies": {"miss": "qstar:ratio=1", **NEXT}},
    ),
    "by the host, substitutes": (
        "olmoe",
        "host",
        {"budget": "60%", "policies": {"miss": "substitute:tolerance=0.9"}},
    ),
    "by the host, too few slots": ("olmoe", "seams", {"budget": "2x"}),
}


@pytest.mark.parametrize(("family", "road", "chosen"), WAYS.values(), ids=list(WAYS))
def test_replayed_tokens_are_the_plain_models(
    family: str, road: str, chosen: dict, tmp_path: Path
) -> None:
    """The logits of a session without kernels, which are the plain model's, its keys and values,
    and its counters."""
    fields = {"sliding_window": 6} if family == "gpt_oss" else {}
    folder = families.save(family, "hub", tmp_path, fields=fields)
    decide = "device" if road == "device" else "host"
    (line,) = interpret(BEGUN + COMPARED, json.dumps([str(folder), decide, chosen]))
    error, key_error, count_alike, captured = json.loads(line)
    assert error < BOUND and key_error < BOUND and count_alike
    graphs = 3 if road == "seams" else 1  # of two layers
    told = {"tokens": 17, "graphs": graphs, "road": road, "captures": 2, "why_not": None}
    assert captured == told, "all but the first"


REPLAYED = """
from pathlib import Path
from runtime.session import build
from runtime.backends import host_copy
from runtime.policies.base import Artefacts
from tests.runtime.replay.test_replay import live_and_replayed

on_gpu()
made = host_copy.HostCopy.__init__

def with_mailbox(own, device):
    made(own, device)
    own._mailbox = host_copy.Mailbox(device)

host_copy.HostCopy.__init__ = with_mailbox
settings = Settings(budget="60%", link="1GB/s", experts="fused", policies={"prefetch": "next_gate"})
opened = open_model(sys.argv[1])
opening = build._install

def install(*parts):
    recorded_graphs.counts.clear()  # of what opening measures
    opening(*parts)

build._install = install
live, again = live_and_replayed(opened, settings, Artefacts(), Path(sys.argv[2]))
passes = zip(live.counters.passes, again.counters.passes, strict=True)
print(recorded_graphs.counts["graphs"], sum(bool((one != other).any()) for one, other in passes))
print(int((live.cache.state != again.cache.state).sum()), live.now == again.now)
"""


def test_the_simulator_replays_what_was_recorded_of_graphs(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Six of the seven tokens that `generate` decodes, on a thread of its own."""
    passes, state = interpret(
        BEGUN + REPLAYED, str(checkpoint("olmoe")), str(tmp_path / "trace.parquet")
    )
    assert passes == "6 0" and state == "0 True"


FAILED = """
import time
folder = sys.argv[1]
opened = open_model(folder)
settings = Settings(budget="60%", link="1GB/s", experts="fused", policies={"prefetch": "next_gate"})
with Session(opened, settings) as session:
    theirs, _ = say(session)
on_gpu()

def interrupted(step, plan):
    if step.layer == 1:
        raise KeyboardInterrupt

with counted_gpu.with_mailbox(Session(opened, settings)) as session:
    past, _ = decode(session, session.forward(ids[:, :5]).past_key_values, range(5, 8))
    session.engine.steps.on_plan = interrupted
    begin_s = time.perf_counter()
    try:
        decode(session, past, range(8, 9))
    except KeyboardInterrupt:
        recorded_graphs.join()
        print(time.perf_counter() - begin_s < 5, len(session.engine.steps.pending))
    session.engine.steps.on_plan = None
    print(error(say(session)[0], theirs) < 5e-6)
    session.validate()
"""


def test_a_graph_whose_host_was_interrupted_ends_at_once(checkpoint: Checkpoint) -> None:
    """It would wait a minute. What follows is right."""
    assert interpret(BEGUN + FAILED, str(checkpoint("olmoe"))) == ["True 0", "True"]


LEFT = """
opened = open_model(sys.argv[1])
on_gpu()
settings = Settings(preset="full", link="1GB/s", experts="fused")

def told(session, **mask):
    _, theirs = decode(session, session.forward(ids[:, :5]).past_key_values, range(5, 9))
    captured = session.engine.captured.receipt()
    print(captured["tokens"], captured["captures"], captured["why_not"])
    return torch.cat(theirs)

with counted_gpu.with_mailbox(Session(opened, settings)) as session:
    whole = told(session)
    openings = []
    session.watcher.see_embeddings()
    session.watcher.on_opening = openings.append
    told(session)
    embedded = opened.model.get_input_embeddings()(ids[0, 5:9]).detach().numpy()
    print(len(openings), all((one.embedding == own).all() for one, own in zip(openings[1:], embedded, strict=True)))
    session.engine.captured.stop()
    told(session)

def asks(module, given, logits):
    assert not logits.isnan().any()

handle = opened.model.get_output_embeddings().register_forward_hook(asks)
with counted_gpu.with_mailbox(Session(opened, settings)) as session:
    print(error(told(session), whole) < 5e-6, session.controller.counters.totals()["requests"])
    session.validate()
    print(session.receipt()["fallbacks"][-1])
handle.remove()
captured_tokens._ALIKE = {torch.float32: -1.0}
with counted_gpu.with_mailbox(Session(opened, settings)) as session:
    told(session)
captured_tokens._ALIKE = {torch.float32: 1e-4}
with counted_gpu.with_mailbox(Session(opened, settings)) as session:
    session.forward(ids[:, :5])
    padded = torch.tensor([[0, 1, 1, 1, 1, 1]])
    past = session.forward(ids[:, :5], mask=padded[:, :5]).past_key_values
    for _ in range(2):
        past = session.forward(ids[:, 5:6], past=past, mask=padded).past_key_values
        padded = torch.nn.functional.pad(padded, (0, 1), value=1)
    print(session.engine.captured.receipt()["why_not"])
"""


def test_what_cannot_be_captured_is_launched_one_by_one_and_says_so(checkpoint: Checkpoint) -> None:
    """A session that was told so, a model whose code asks the host, one that says something
    else from there, a padded sequence. A capture that fails has counted nothing."""
    answers = interpret(BEGUN + LEFT, str(checkpoint("olmoe")))
    whole, observed, embedded, stopped, asked, is_right, line, differs, padded = answers
    assert differs.startswith(
        "0 0 RuntimeError: from keys and values at fixed addresses its logits differ by"
    )
    assert whole == "3 1 None" and stopped == "7 1 it was stopped"
    assert observed == "7 1 None" and embedded == "5 True", (
        "the host sees what a replayed token is embedded as"
    )
    assert asked.startswith("0 0 Unsupported: operation not permitted when stream is capturing")
    assert is_right.startswith("True") and padded == "the sequence is padded"
    assert line.startswith(
        "decoded tokens are launched one by one, not as CUDA graphs: Unsupported"
    )


TABLES = """
with Session(open_model(sys.argv[1]), Settings(preset="full", link="1GB/s")) as session:
    theirs, _ = say(session)
on_gpu()
settings = Settings(preset="full", link="1GB/s", experts="fused")
with counted_gpu.with_mailbox(Session(open_model(sys.argv[1]), settings)) as session:
    print(error(say(session)[0], theirs) < 5e-6, session.receipt()["captured"]["tokens"])
    print(session.receipt()["fallbacks"][-1])
"""


def test_tokens_that_need_rows_of_a_table_are_launched_one_by_one(tmp_path: Path) -> None:
    model = tiny("gemma4_text")
    model.config.dtype = torch.float32
    model.save_pretrained(tmp_path)
    assert interpret(BEGUN + TABLES, str(tmp_path)) == [
        "True 0",
        "decoded tokens are launched one by one, not as CUDA graphs: rows of tables are read from "
        "files for each token",
    ]

"""What a decoded token asks of a GPU's driver, counted without a GPU, so that it cannot grow
unseen."""

import json
from dataclasses import dataclass

import pytest

from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
COUNTED = """
import json, sys
import pytest, torch
from runtime.backends import host_copy
from runtime.kernels.gpu import mailbox
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.helpers import recorded_graphs
from tools.gpu.faked import counted_gpu
from tools.gpu.faked.counted_gpu import counts, with_mailbox
gated._ROWS, gated._COLUMNS = 32, 64
folder, decide, chosen = json.loads(sys.argv[1])
ids = torch.randint(3, 96, (1, 36), generator=torch.Generator().manual_seed(2))
opened = open_model(folder)

def decode(session, past, positions):
    said = []
    for position in positions:
        now = session.forward(ids[:, position : position + 1], past=past)
        past = now.past_key_values
        said.append(now.logits[0, 0])
    return past, said

held = []

def hold_letters():
    # Letters come when the host waits for them.
    send, wait = mailbox.send_next, host_copy.wait_for

    def come(letter, number, device):
        send(*held.pop(0))
        counts["launches"] -= 1  # it was counted when it was held
        wait(letter, number, device)

    def hold(values, *others):
        counts["launches"] += 1
        held.append((values.clone(), *others))

    mailbox.send_next, host_copy.wait_for = hold, come

with Session(opened, Settings(**chosen, link="1GB/s")) as session:
    past = session.forward(ids[:, :12]).past_key_values
    _, theirs = decode(session, past, range(12, 36))
recorded_graphs.install(pytest.MonkeyPatch())
counted_gpu.install()
real = mailbox.send_next, host_copy.wait_for
settings = Settings(**chosen, link="1GB/s", experts="fused", decide=decide)
with with_mailbox(Session(opened, settings)) as session:
    session.engine.captured.uninstall()
    past = session.forward(ids[:, :12]).past_key_values
    past, ours = decode(session, past, range(12, 22))
    counts.clear()
    first_pass = session.num_passes
    past, rest = decode(session, past, range(22, 28))
    if decide == "device":
        hold_letters()
    past, more = decode(session, past, range(28, 30))
    each = {name: count / 8 for name, count in counts.items()}
    totals = session.controller.counters.totals(first_pass=first_pass)
    assert totals["requests"] == 8 * opened.shape.num_layers * opened.shape.top_k and not held
    mailbox.send_next, host_copy.wait_for = real
    session.engine.captured.install()
    past, captured = decode(session, past, range(30, 32))  # the second one is captured
    counts.clear()
    recorded_graphs.counts.clear()
    first_pass = session.num_passes
    captured += decode(session, past, range(32, 36))[1]
    replayed = {name: count / 4 for name, count in (counts | recorded_graphs.counts).items()}
    session.engine.validate()
    moved = session.controller.counters.totals(first_pass=first_pass)
said = ours + rest + more + captured
error = max((one - other).abs().max() / other.abs().max() for one, other in zip(said, theirs, strict=True))
hits = totals["hits"] / totals["requests"]
loads = (moved["fetched"] + moved["prefetches"]) / 4
print(json.dumps([each, replayed, opened.shape.num_layers, totals["misses"] / 8, hits, loads, error.item()]))
"""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a token asks of the driver, launched one by one and replayed, and what its experts were
    like."""

    each: dict[str, float]
    replayed: dict[str, float]
    layers: int
    misses: float
    hit_rate: float
    loads: float  # of the replayed tokens


def counted(folder: str, *, decide: str = "host", **chosen: object) -> Counted:
    """Counts of a session whose logits are right."""
    (line,) = interpret(COUNTED, json.dumps([folder, decide, chosen]))
    *found, error = json.loads(line)
    assert error < 5e-6
    return Counted(*found)


@pytest.mark.parametrize(
    "policies", [{}, {"prefetch": "next_gate"}], ids=["on demand", "next gate"]
)
def test_a_token_whose_experts_come_over_the_link(
    checkpoint: Checkpoint, policies: dict[str, str]
) -> None:
    """Before: 3 operations to pack ids, 2 + m small copies, 3 + 2 m launches and 8 m calls for
    events a layer with m misses, two new events a copy. Replayed: nothing but one graph, and for
    each load one copy and at most one number behind it, which is a copy too."""
    found = counted(str(checkpoint("olmoe")), budget="60%", policies=policies)
    each = found.each
    layers = found.layers
    assert 0.3 < found.hit_rate < 1 and found.misses
    assert each["host waits"] <= layers + 1, "the ids of a layer, and the stalls of a token"
    assert each["launches"] <= 5 * layers, "one that sends the ids, and two pairs for experts"
    assert each.get("small copies", 0) == 0
    assert each.get("events made", 0) <= 1, (
        "a pool: more only where a token needs more than any before it"
    )
    if not policies.get("prefetch"):
        assert each["copies of experts"] == found.misses
        assert each["event calls"] <= 8 * layers, (
            "whatever the misses: a layer's copies are between two events"
        )
    replayed = found.replayed
    assert replayed.pop("host waits") <= layers + 1, "the letters of a token"
    assert 0 < replayed.pop("flags") <= found.loads
    assert replayed == {"graphs": 1, "copies of experts": found.loads}


def test_a_token_that_the_device_decides(checkpoint: Checkpoint) -> None:
    """The host waits for nothing. A kernel sends the counters at the end of a token, and the host
    reads them once they have come. This test delays the counters of the last two tokens until they
    are asked for. A layer has six kernels: `resolve`, `fill` on a branch, which two events fork and
    join, and two each for the experts that are there and for those that come."""
    found = counted(str(checkpoint("olmoe")), decide="device", budget="60%")
    assert 0.3 < found.hit_rate < 1 and found.misses
    assert found.each == {"launches": 6 * found.layers + 1, "event calls": 4 * found.layers}
    assert found.replayed == {"graphs": 1}


@pytest.mark.parametrize("order", [{}, {"eviction": "late_horizon"}], ids=["lru", "late_horizon"])
def test_a_token_for_which_the_device_prefetches(
    checkpoint: Checkpoint, order: dict[str, str]
) -> None:
    """A kernel that decides and one that copies more, both on the branch, which compute joins once
    more in each layer and at the end. For an order that the host writes it waits once a token for
    what the token before used, if that has not come: in one of eight here."""
    policies = {"prefetch": "next_gate", **order}
    own = {"budget": "60%", "window": "100KB", "policies": policies}
    found = counted(str(checkpoint("olmoe")), decide="device", **own)
    assert 0.3 < found.hit_rate < 1
    waits = {"host waits": 1 / 8} if order else {}
    layers = found.layers
    assert found.each == {"launches": 8 * layers + 1, "event calls": 6 * layers + 2, **waits}
    assert found.replayed == {"graphs": 1}


def test_a_token_whose_experts_are_all_there(checkpoint: Checkpoint) -> None:
    """From the first one on: nothing is asked of the host."""
    found = counted(str(checkpoint("olmoe")), preset="full")
    assert (found.misses, found.hit_rate) == (0, 1)
    assert found.each == {"launches": 2 * found.layers}
    assert found.replayed == {"graphs": 1}

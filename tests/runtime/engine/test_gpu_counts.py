"""What a decoded token asks of a GPU's driver, counted without a GPU, so that it cannot grow unseen."""

import json

import pytest

from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = needs_triton
COUNTED = """
import json, sys
import torch
from runtime.engine.host_copy import Mailbox
from runtime.kernels.gpu import gated, mailbox
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.helpers import counted_gpu
from tests.helpers.counted_gpu import counts, with_mailbox
gated._ROWS, gated._COLUMNS = 32, 64
folder, decide, chosen = json.loads(sys.argv[1])
ids = torch.randint(3, 96, (1, 30), generator=torch.Generator().manual_seed(2))
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
    send, wait = mailbox.send, Mailbox._await

    def come(self):
        send(*held.pop(0))
        wait(self)

    def hold(ids, *others):
        counts["launches"] += 1
        held.append((ids.clone(), *others))

    mailbox.send, Mailbox._await = hold, come

with Session(opened, Settings(**chosen, link="1GB/s")) as session:
    past = session.forward(ids[:, :12]).past_key_values
    _, theirs = decode(session, past, range(12, 30))
counted_gpu.install()
settings = Settings(**chosen, link="1GB/s", experts="fused", decide=decide)
with with_mailbox(Session(opened, settings)) as session:
    past = session.forward(ids[:, :12]).past_key_values
    past, ours = decode(session, past, range(12, 22))
    counts.clear()
    first_pass = session.num_passes
    past, rest = decode(session, past, range(22, 28))
    if decide == "device":
        hold_letters()
    rest += decode(session, past, range(28, 30))[1]
    each = {name: count / 8 for name, count in counts.items()}
    totals = session.controller.counters.totals(first_pass=first_pass)
    assert totals["requests"] == 8 * opened.shape.num_layers * opened.shape.top_k and not held
    session.engine.validate()
error = max((one - other).abs().max() / other.abs().max() for one, other in zip(ours + rest, theirs, strict=True))
hits = totals["hits"] / totals["requests"]
print(json.dumps([each, opened.shape.num_layers, totals["misses"] / 8, hits, error.item()]))
"""


def counted(folder: str, *, decide: str = "host", **chosen: object) -> tuple[dict[str, float], int, float, float]:
    """What a token asks of the driver, the layers, misses a token and the hit rate; the logits are right."""
    (line,) = interpret(COUNTED, json.dumps([folder, decide, chosen]))
    each, layers, misses, hit_rate, error = json.loads(line)
    assert error < 5e-6
    return each, layers, misses, hit_rate


@pytest.mark.parametrize("policies", [{}, {"prefetch": "next_gate"}], ids=["on demand", "next gate"])
def test_a_token_whose_experts_come_over_the_link(checkpoint: Checkpoint, policies: dict[str, str]) -> None:
    """Before: 3 operations to pack ids, 2 + m small copies, 3 + 2 m launches and 8 m calls for events a layer with m
    misses, two new events a copy."""
    each, layers, misses, hit_rate = counted(str(checkpoint("olmoe")), budget="60%", policies=policies)
    assert 0.3 < hit_rate < 1 and misses
    assert each["host waits"] <= layers + 1, "the ids of a layer, and the stalls of a token"
    assert each["launches"] <= 5 * layers, "one that sends the ids, and two pairs for experts"
    assert each.get("small copies", 0) == 0
    assert each.get("events made", 0) <= 1, "a pool: more only where a token needs more than any before it"
    if not policies.get("prefetch"):
        assert each["copies of experts"] == misses
        assert each["event calls"] <= 8 * layers, "whatever the misses: a layer's copies are between two events"


def test_a_token_that_the_device_decides(checkpoint: Checkpoint) -> None:
    """The host waits for nothing. A kernel sends the counters at the end of a token, and the host reads them once they
    have come. This test delays the counters of the last two tokens until they are asked for. A layer has four kernels:
    `resolve`, `fill`, and two for its experts."""
    each, layers, misses, hit_rate = counted(str(checkpoint("olmoe")), decide="device", budget="60%")
    assert 0.3 < hit_rate < 1 and misses
    assert each == {"launches": 4 * layers + 1}


def test_a_token_whose_experts_are_all_there(checkpoint: Checkpoint) -> None:
    """From the first one on: nothing is asked of the host."""
    each, layers, misses, hit_rate = counted(str(checkpoint("olmoe")), preset="full")
    assert (misses, hit_rate) == (0, 1)
    assert each == {"launches": 2 * layers}

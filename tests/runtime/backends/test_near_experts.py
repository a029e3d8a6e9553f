"""Near experts beside a GPU, by triton's interpreter and a stand-in for streams: the order of
copies, launches and the host's work, and the outputs."""

import json
from collections.abc import Iterable

import pytest

from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
NEAR = """
import json, sys
import torch
from runtime.backends import host_copy
from runtime.backends.triton import triton_backend
from runtime.backends.cpu.forms_cpu import TokenKernels
from runtime.backends.host_copy import HostTokens
from runtime.backends.triton.triton_backend import TritonBackend
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from runtime.tiers.near import NearTier
from tools.gpu.faked import counted_gpu
from triton.runtime.interpreter import GridExecutor
gated._ROWS, gated._COLUMNS = 32, 64
folder, chosen = json.loads(sys.argv[1])
ids = torch.randint(3, 96, (2, 30), generator=torch.Generator().manual_seed(2))
opened, said = open_model(folder), []

def logits(session):
    first = session.forward(ids[:1, :12])
    past, outputs = first.past_key_values, [first.logits[0]]
    said.append("tokens")
    for position in range(12, 18):
        now = session.forward(ids[:1, position : position + 1], past=past)
        past = now.past_key_values
        outputs.append(now.logits[0])
    said.append("batch")
    outputs.append(session.forward(ids[:, :5]).logits[:, -1])
    return torch.cat(outputs), session.controller.counters.totals()

def noted(owner, name, word):
    work = getattr(owner, name)
    def call(self, *arguments, **named):
        said.append(word(self) if callable(word) else word)
        return work(self, *arguments, **named)
    setattr(owner, name, call)

with Session(opened, Settings(**chosen, link="1GB/s")) as session:
    theirs, counts = logits(session)
counted_gpu.install()
noted(GridExecutor, "__call__", lambda self: self.fn.__name__)
noted(HostTokens, "fetch", "fetch")
noted(HostTokens, "bring", "bring")
noted(NearTier, "forward", "torch")
noted(TokenKernels, "outputs", "kernels")
noted(TokenKernels, "forward", "kernels")
noted(TritonBackend, "finish", "finish")
said.clear()
with counted_gpu.with_mailbox(Session(opened, Settings(**chosen, link="1GB/s", experts="fused"))) as session:
    ours, own_counts = logits(session)
tokens, batch = said.index("tokens"), said.index("batch")
error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
print(json.dumps([said[tokens + 1 : batch], said[batch + 1 :], error, counts == own_counts]))
"""


@pytest.mark.parametrize(("family", "how"), [("olmoe", "kernels"), ("gpt_oss", "torch")])
def test_the_host_computes_once_the_gpu_has_work(
    checkpoint: Checkpoint, family: str, how: str
) -> None:
    """A token's residents are launched before the host computes, its result goes to the device in
    one piece, and the experts are added up after that, where all are resident by `_down` itself;
    gpt-oss has no kernels on a CPU."""
    chosen = {"preset": "near", "budget": "50%"}
    (line,) = interpret(NEAR, json.dumps([str(checkpoint(family)), chosen]))
    tokens, batch, error, counts_alike = json.loads(line)
    assert error < 5e-6 and counts_alike
    beside = f"fetch _inner _down {how} bring"
    alone = f"fetch {how} bring"
    resident = "_inner _down"
    assert beside in layers(tokens) <= {beside, alone, resident}
    in_batch = layers("kernels" if word == "torch" else word for word in batch)
    assert in_batch == {beside.replace("torch", "kernels")}


def layers(said: Iterable[str]) -> set[str]:
    """What was said of each layer, every word once."""
    of_each = " ".join(word for word in said if word not in ("_send", "_combine")).split(" finish")
    return {" ".join(dict.fromkeys(words.split())) for words in of_each if words}

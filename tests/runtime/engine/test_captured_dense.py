"""Sessions whose captured tokens have the GPU's kernels for norms, routers and attention say what
the plain model says, in few kernels a layer; by a stand-in for CUDA graphs."""

import json
from pathlib import Path

import pytest

from tests.helpers import families
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
BOUND = 5e-6  # of the largest logit, in float32
COUNTED = """
import json, sys
import pytest, torch
from runtime.engine import captured_tokens
from runtime.kernels.gpu.dense.decoder import TritonAttention, TritonDecoder
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.session import build
from runtime.session.session import Session, Settings
from tests.helpers import recorded_graphs
from tools.gpu.faked import counted_gpu
gated._ROWS, gated._COLUMNS = 32, 64
captured_tokens._LEAST, captured_tokens._SPARE = 64, 1  # two shares of a head's positions
folder, decide, settings = json.loads(sys.argv[1])
ids = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(2))
opened = open_model(folder)

def decode(session):
    now = session.forward(ids[:, :28])
    logits = []
    for position in range(28, 36):
        now = session.forward(ids[:, position : position + 1], past=now.past_key_values)
        logits.append(now.logits[0])
    return torch.cat(logits), now.past_key_values

with Session(opened, Settings(**settings, link="1GB/s")) as session:
    theirs, their_past = decode(session)
recorded_graphs.install(pytest.MonkeyPatch())
counted_gpu.install()
build.TritonDecoder = TritonDecoder
settings |= {"experts": "fused", "decide": decide}
with counted_gpu.with_mailbox(Session(opened, Settings(**settings, link="1GB/s"))) as session:
    ours, past = decode(session)
    receipt = session.receipt()
    session.validate()
errors = [((one - other).abs().max() / other.abs().max()).item() for one, other in [
    (ours, theirs), *((one.keys, other.keys) for one, other in zip(past.layers, their_past.layers, strict=True)),
]]
kernels = recorded_graphs.counts["captured kernels"]
print(json.dumps([kernels, max(errors), receipt["captured"], receipt["compiled"]]))
"""


def captured(
    folder: Path, family: str, num_layers: int, *, decide: str = "host", **settings: object
) -> tuple[int, dict[str, object]]:
    """The kernels of a captured token that is right, and what of it is compiled."""
    fields = {"num_hidden_layers": num_layers}
    fields |= {"mlp_only_layers": []} if family == "qwen3_moe" else {}  # all have experts
    saved = families.save(family, "hub", folder, fields=fields)
    (line,) = interpret(COUNTED, json.dumps([str(saved), decide, settings]))
    kernels, error, told, compiled = json.loads(line)
    assert error < BOUND
    assert (told["tokens"], told["captures"], told["why_not"]) == (7, 1, None)
    assert compiled["attentions"] == compiled["blocks"] == compiled["routers"] == num_layers
    return kernels, compiled


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_a_layer_of_a_resident_token_is_few_kernels(family: str, tmp_path: Path) -> None:
    """Two norms, four products of attention, its heads and the attention itself, the router's
    product and choice, two kernels of experts, and a sum."""
    two, _ = captured(tmp_path / "two", family, 2, preset="full")
    three, compiled = captured(tmp_path / "three", family, 3, preset="full")
    assert three - two == 13
    assert compiled["norms"] == 4 * 3 + 1 and compiled["attentions_left"] == {}


def test_a_layer_that_the_device_decides_has_four_more(tmp_path: Path) -> None:
    """What finds slots, what copies, and two of the experts that are there beside those that
    come."""
    two, _ = captured(tmp_path / "two", "olmoe", 2, decide="device", budget="60%")
    three, _ = captured(tmp_path / "three", "olmoe", 3, decide="device", budget="60%")
    assert three - two == 17

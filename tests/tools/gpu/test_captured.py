"""The probe that holds tokens replayed as graphs against tokens launched one by one, by the
interpreter."""

import json

import pytest

from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton
from tools.gpu.probes.captured import Compared, lines, ways
from tools.gpu.probes.road import Decoded

pytestmark = pytest.mark.slow

PROBED = """
import sys
import numpy as np
import pytest
from dataclasses import replace
from tests.helpers import recorded_graphs
from tools.gpu.faked import counted_gpu
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from tools.gpu.groups import tell
from tools.gpu.probes import captured, road
gated._ROWS, gated._COLUMNS = 32, 64
recorded_graphs.install(pytest.MonkeyPatch())
counted_gpu.install()
road.PROMPT, captured.CALLS = 4, 1
settings = captured.ways("cpu")["all resident"]
found = captured.compared(open_model(sys.argv[1]), settings, np.arange(3, 11), rounds=1)
for line in captured.lines("all resident", found, 1e-5):
    tell(**line)
found.replayed[0] = replace(found.replayed[0], logits=found.replayed[0].logits + 1)
tell(**[*captured.lines("all resident", found, 1e-5)][-1])
"""


@needs_triton
def test_both_are_measured_and_held_against_each_other(checkpoint: Checkpoint) -> None:
    singly, graphs, both, wrong = map(json.loads, interpret(PROBED, str(checkpoint("olmoe"))))
    assert singly["name"] == "all resident, launched one by one" and singly["ms_per_token"] > 0
    assert (graphs["tokens"], graphs["graphs"], graphs["captures"], graphs["detail"]) == (
        3,
        1,
        1,
        None,
    )
    assert 0 < graphs["ms_per_token"] <= graphs["capture_ms"] and graphs["device_us"] > 0
    assert both["passed"] and both["detail"] == "counters equal" and both["times_as_fast"] > 0
    assert not wrong["passed"]


def test_without_graphs_it_says_so() -> None:
    assert [*ways("cpu")] == ["the host decides", "all resident"] and len(ways("cuda")) == 4
    found = Compared(singly=[Decoded([2.0], None, {})])
    assert [line.get("detail") for line in lines("x", found, 0.1)] == [
        None,
        "there are no CUDA graphs here",
    ]

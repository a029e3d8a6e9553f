"""The probe that holds the device's road against the host's, by the interpreter."""

import json

import pytest

from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = pytest.mark.slow

PROBED = """
import sys
import numpy as np
from dataclasses import replace
from runtime.backends.triton import triton_backend
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from tools.gpu.probes import road
gated._ROWS, gated._COLUMNS = 32, 64
CpuBackend.suits = staticmethod(lambda opened, **_: False)
triton_backend._runs_on = lambda device: True
road.roads, road.PROMPT, road.CALLS = lambda device: ("host", "device"), 4, 1
for way in road.WAYS:
    found = road.compared(open_model(sys.argv[1]), np.arange(3, 11), way, "cpu", rounds=1)
    road.told(way, found)
road.told(way, found | {"device": [replace(found["device"][0], logits=found["device"][0].logits + 1)]})
"""


@needs_triton
def test_both_roads_are_measured_and_held_against_each_other(checkpoint: Checkpoint) -> None:
    layer, *lines = map(json.loads, interpret(PROBED, str(checkpoint("olmoe"))))
    assert layer["name"].endswith("captured") and layer["us"] > 0
    ways = ("on demand", "next gate", "late horizon, next gate where likely")
    for way, first in zip(ways, (0, 3, 6), strict=True):
        host, device, both = lines[first : first + 3]
        assert (
            host["name"] == f"{way}, decided by the host"
            and device["name"] == f"{way}, decided by the device"
        )
        assert host["ms_per_token"] > 0 and host["hit_rate"] == device["hit_rate"] > 0
        assert both["passed"] and both["times_as_fast"] > 0 and both["detail"] == "counters equal"
    assert not lines[-1]["passed"]

"""Whole sessions on experts as published, by the GPU kernels in triton's interpreter on a CPU: what
torch says on the dequantised experts, and the counters of that session."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import families
from tests.helpers.published import publish
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = pytest.mark.slow

RUNS = {
    "fp8": ("mixtral", {"hidden_act": "gelu"}, {"preset": "full"}),
    "mxfp4": ("gpt_oss", {}, {"budget": "50%"}),
    "compressed-tensors": ("mixtral", {}, {"preset": "near", "budget": "25%"}),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96}
SESSIONS = """
import json, sys
import torch
from runtime.backends.triton import triton_backend
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.backends.triton.forms_published_gpu import GpuPublished
from runtime.kernels.gpu import published
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT, FUSED
published._BLOCKS = dict.fromkeys(published._BLOCKS, (128, 128))
CpuBackend.suits = staticmethod(lambda opened, **_: False)
triton_backend._runs_on = lambda device: True  # the interpreter runs the kernels on the CPU
ids = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(2))
calls = []
for name in ("multiply", "weights"):
    honest = getattr(GpuPublished, name)
    def counted(self, *args, honest=honest, name=name, **own):
        calls.append(name)
        return honest(self, *args, **own)
    setattr(GpuPublished, name, counted)
def logits(session):
    first = session.forward(ids[:1, :12])  # more tokens than the kernels take
    past, outputs = first.past_key_values, [first.logits[0]]
    for position in (12, 13):
        now = session.forward(ids[:1, position : position + 1], past=past)
        past = now.past_key_values
        outputs.append(now.logits[0])
    outputs.append(session.forward(ids[:, :3]).logits[:, -1])  # few, in a batch
    session.controller.cache.validate()
    return torch.cat(outputs)
for folder, chosen in json.loads(sys.argv[1]):
    opened, runs = open_model(folder), {}
    for experts in (EXACT, FUSED):
        with Session(opened, Settings(**chosen, experts=experts)) as session:
            runs[experts] = (logits(session), session.controller.counters.totals(), session.receipt())
    (exact, exact_counts, _), (fused, fused_counts, receipt) = runs[EXACT], runs[FUSED]
    error = ((fused - exact).abs().max() / exact.abs().max()).item()
    computed, used = receipt["experts_of_a_token"], sorted(set(calls))
    print(json.dumps([error, exact_counts == fused_counts, computed, used]))
    calls.clear()
"""


@needs_triton
def test_sessions_say_what_torch_says_and_count_alike(tmp_path: Path) -> None:
    cases = []
    for method, (family, fields, chosen) in RUNS.items():
        folder = tmp_path / method
        plain = families.save(family, "hub", folder / "plain", torch.float32, fields=SIZES | fields)
        cases.append((str(publish(plain, folder / "published", method)), chosen))
    lines = [json.loads(line) for line in interpret(SESSIONS, json.dumps(cases))]
    assert len(lines) == len(RUNS)
    for method, (error, counts_alike, computed, used) in zip(RUNS, lines, strict=True):
        assert error <= 5e-6 and counts_alike, (method, error)
        assert (computed, used) == ("fused, triton", ["multiply", "weights"]), method

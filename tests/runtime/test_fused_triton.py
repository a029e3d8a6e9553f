"""Kernels for few tokens' experts on a GPU, by triton's interpreter on a CPU, whole sessions too; and they compile."""

import json
from pathlib import Path

from tests.families import FAMILIES
from tests.runtime.triton_process import needs_triton, run

pytestmark = needs_triton
OTHERS = {"gpt_oss"}  # biased, transposed, with a gate of its own
# Tokens, ranks, experts, hidden, neurons: blocks that are full or not, one pair or many.
SIZES = [(1, 1, 1, 7, 5), (2, 3, 8, 70, 40)]
ALLOWED = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-2}  # the interpreter cuts bfloat16 where a GPU rounds
KERNELS = """
import json, sys
import torch
from torch.nn import functional as F
from runtime import fused_triton
fused_triton._ROWS, fused_triton._COLUMNS, fused_triton._OUTPUTS = 16, 32, 64
sizes, dtypes = json.loads(sys.argv[1])
random = torch.Generator().manual_seed(0)
for T, K, E, H, I in sizes:
    for dtype in [getattr(torch, name) for name in dtypes]:
        stride = 3 * H * I + 64
        arena = torch.randn(E * stride, generator=random).mul(H**-0.5).to(dtype)
        starts = torch.randperm(E, generator=random) * stride
        keys = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(T)])
        if K > 2:
            keys[-1, 1] = -1
        x, weights = torch.randn(T, H, generator=random).to(dtype), torch.rand(T, K, generator=random)
        expected = torch.zeros_like(x)
        for expert in range(E):
            own = arena[starts[expert] :]
            gate_up, down = own[: 2 * I * H].view(2 * I, H), own[2 * I * H + 32 :][: H * I].view(H, I)
            for token, rank in (keys == expert).nonzero().tolist():
                gate, up = F.linear(x[token], gate_up).chunk(2)
                expected[token] += (F.linear(F.silu(gate) * up, down) * weights[token, rank]).to(dtype)
        y, inner, out = torch.empty(T * K, H), torch.empty(T * K, I, dtype=dtype), torch.empty_like(x)
        offsets = (0, 2 * I * H + 32)
        for turn in range(2):  # some pairs at first, the others later
            numbers = torch.where((keys % 2 == turn) & (keys >= 0), keys, -1).to(torch.int32)
            fused_triton.multiply(x, numbers, starts, arena, offsets=offsets, inner=inner, y=y)
        fused_triton.combine(y, keys, weights, out)
        error = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
        print(json.dumps([[T, K, E, H, I], str(dtype).removeprefix("torch."), error.item()]))
"""
SESSIONS = """
import json, sys
import torch
from runtime import fused_cuda, fused_triton
from runtime.fused import EXACT, FUSED, Fused
from runtime.model import open_model
from runtime.session import Session, Settings
torch.set_num_threads(1)
fused_triton._ROWS, fused_triton._COLUMNS, fused_triton._OUTPUTS = 32, 64, 64
Fused.suits = staticmethod(lambda opened: False)
fused_cuda._runs_on = lambda device: True  # as far as the interpreter goes, the CPU is a GPU
ids = torch.randint(3, 96, (1, 38), generator=torch.Generator().manual_seed(2))
def decoded(session):
    said, outputs = session.forward(ids[:, :36]), []
    for position in range(36, 38):
        said = session.forward(ids[:, position : position + 1], past=said.past_key_values)
        outputs.append(said.logits[0, -1])
    session.controller.cache.validate()
    return torch.stack(outputs)
for folder, name, chosen in json.loads(sys.argv[1]):
    opened = open_model(folder)
    told = {}
    for experts in (EXACT, FUSED):
        with Session(opened, Settings(**chosen, experts=experts)) as session:
            told[experts] = (decoded(session), session.controller.counters.totals(), session.receipt())
            if experts == FUSED and session.is_fused:
                on_device = len(session.engine._fused.whole)
    (exact, counted, _), (fused, also, receipt) = told[EXACT], told[FUSED]
    error = ((fused - exact).abs().max() / exact.abs().max()).item()
    print(json.dumps([opened.family, name, error, counted == also, receipt["experts_of_a_token"], on_device]))
"""
TOKENS = """
import sys
import numpy as np
import torch
from runtime import fused_cuda
from runtime.experts import accumulate, assign, gather, weigh
from runtime.fused import FUSED, Fused
from runtime.model import open_model
from runtime.session import Session, Settings
Fused.suits = staticmethod(lambda opened: False)
fused_cuda._runs_on = lambda device: True
opened = open_model(sys.argv[1])
with Session(opened, Settings(preset="full", experts=FUSED)) as session:
    session.forward(torch.arange(3, 90)[None])
    resident, fused, module = session.engine._resident, session.engine._fused, opened.layers[0].experts
    random = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(3, opened.config.hidden_size, generator=random), torch.rand(3, 2, generator=random)
    selected = np.array([[2, 0], [1, -1], [0, 3]])
    places, expected = session.controller.cache.places[:4], torch.zeros_like(hidden)
    own = assign(selected, hidden.device)
    outputs = [resident.forward(module, places[expert], gather(hidden, own[expert])) for expert in range(4)]
    for expert, y in enumerate(outputs):
        accumulate(expected, weigh(y, weights, own[expert]), own[expert])
    fused.begin(module, hidden, selected, weights.numpy())
    fused.add([places[3], places[1]])
    fused.add_output(0, outputs[0])  # as one that was computed near
    fused.add([places[2]])
    print(((fused.finish() - expected).abs().max() / expected.abs().max()).item())

    def at_once():
        return module.moectl_forward(hidden[:1], torch.tensor([[2, 0]]), weights[:1]), fused.whole[0].tolist()

    before, starts = at_once()
    session.engine.forget()
    session.forward(torch.arange(20, 90)[None])  # in another order, into other slots
    after, others = at_once()
    print(int(starts != others), int(torch.equal(before, after)))
"""
RUNS = {
    "all resident": {"preset": "full"},
    "loaded as wanted": {"budget": "50%"},
    "prefetched, some late": {"preset": "specmd", "budget": "50%", "link": "100MB/s+20us", "window": "16KB"},
    "near": {"preset": "near", "budget": "25%"},
    "weakest dropped": {"budget": "50%", "policies": {"miss": "drop:rank=1"}},
}
EVERYWHERE = "all resident"
COMPILED = """
from runtime.fused_triton import _combine, _down, _inner
from tests.runtime.triton_process import cubin_size
sizes = {"block_rows": 8, "block_columns": 256}
for capability, kind in ((80, "bf16"), (90, "fp32")):
    tensors = {name: f"*{kind}" for name in ("x_ptr", "arena_ptr", "inner_ptr", "out_ptr")}
    tensors |= {"numbers_ptr": "*i64", "starts_ptr": "*i64", "keys_ptr": "*i32"}
    tensors |= {"y_ptr": "*fp32", "weights_ptr": "*fp32"}
    for kernel, constants in ((_inner, sizes), (_down, sizes), (_combine, {"width": 8, "block": 256})):
        print(cubin_size(kernel, capability, tensors, **constants))
"""


def test_kernels_give_what_the_module_gives() -> None:
    lines = run(KERNELS, json.dumps([SIZES, list(ALLOWED)]), TRITON_INTERPRET="1")
    assert len(lines) == len(SIZES) * len(ALLOWED)
    for case, dtype, error in map(json.loads, lines):
        assert error <= ALLOWED[dtype], (case, dtype, error)


def test_sessions_decode_what_torch_decodes_and_count_alike(checkpoint) -> None:
    """Every family with everything resident, one family in every run: lossless or not, near or late."""
    families = [name for name in FAMILIES if name not in OTHERS]
    cases = [(str(checkpoint(family)), EVERYWHERE, RUNS[EVERYWHERE]) for family in families]
    cases += [(str(checkpoint("mixtral")), name, chosen) for name, chosen in RUNS.items() if name != EVERYWHERE]
    found = [json.loads(line) for line in run(SESSIONS, json.dumps(cases), TRITON_INTERPRET="1")]
    assert len(found) == len(cases)
    for family, name, error, counts_alike, computed, num_on_device in found:
        assert error <= 2e-6 and counts_alike, (family, name, error)
        assert computed == "fused, triton"
        assert (num_on_device > 0) == (name == EVERYWHERE), (family, name)


def test_several_tokens_at_once_wherever_their_experts_are_computed(checkpoint) -> None:
    """And a layer that is wholly there is found again where it lies after the fast tier was emptied and filled."""
    error, found_again = run(TOKENS, str(checkpoint("mixtral")), TRITON_INTERPRET="1")
    assert float(error) <= 2e-6
    assert found_again == "1 1"


def test_they_compile_for_gpus(tmp_path: Path) -> None:
    sizes = run(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
    assert len(sizes) == 6 and all(int(size) > 0 for size in sizes)

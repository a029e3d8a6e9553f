"""Experts of every gate, with and without biases, by the GPU kernels in triton's interpreter on a
CPU; and which gate a family's module has."""

import json
from types import SimpleNamespace

import pytest
import torch

from runtime.kernels.gates import SILU, Gate, gate_of
from runtime.model.layers import moe_layers
from tests.helpers.triton_process import interpret, needs_triton
from tools.make.families import tiny

pytestmark = pytest.mark.slow

GPT_OSS = Gate("scaled", take_turns=True, alpha=1.702, limit=7.0)
FOUND = {
    "mixtral": SILU,
    "gpt_oss": GPT_OSS,
    "deepseek_v4": Gate("silu", limit=10.0),
    "minimax_m3_vl_text": Gate("scaled", alpha=1.702, limit=7.0),
    "gemma4_text": Gate("gelu_tanh"),
    "nemotron_h": Gate("relu2", has_up=False),
    "beam": None,  # rounds once only
}
# Gates with limits that random numbers reach; whether matrices are [in, out]; whether there are
# biases.
CASES = [
    (["scaled", True, True, 1.702, 0.5], True, True),
    (["scaled", True, False, 1.702, 0.5], False, False),
    (["silu", True, False, 1.0, 0.4], False, True),
    (["silu", True, False, 1.0, None], True, False),
    (["gelu", True, False, 1.0, None], False, False),
    (["gelu_tanh", True, False, 1.0, None], False, True),
    (["relu2", False, False, 1.0, None], False, True),
    (["relu2", False, False, 1.0, None], True, False),
]
ALLOWED = {"float32": 1e-6, "float16": 1e-3}
EXPERTS = """
import json, sys
import torch
from runtime.kernels.gpu.experts import gated
from runtime.kernels.gpu.experts import gated_tiles
from runtime.kernels.gpu.addressing import Strides
from runtime.kernels.gates import Gate
from runtime.kernels.gpu.tiles import SortedPairs
from runtime.model.layout import ExpertLayout
gated._ROWS, gated._COLUMNS = 16, 64
gated_tiles._OUTPUTS = 32
T, K, E, H, I = 3, 2, 3, 38, 21
cases, dtypes = json.loads(sys.argv[1])
random = torch.Generator().manual_seed(0)
keys = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(T)])
for own, is_transposed, has_bias in cases:
    gate = Gate(*own)
    outputs = 2 * I if gate.has_up else I
    name = "gate_up_proj" if gate.has_up else "up_proj"
    shapes = {name: (outputs, H), f"{name}_bias": (outputs,), "down_proj": (H, I), "down_proj_bias": (H,)}
    shapes = {name: shape[::-1] if is_transposed else shape for name, shape in shapes.items()}
    shapes = {name: shape for name, shape in shapes.items() if has_bias or not name.endswith("_bias")}
    for dtype in (getattr(torch, name) for name in dtypes):
        layout = ExpertLayout.of(shapes, dtype)
        arena = torch.randn(E * layout.nbytes // dtype.itemsize, generator=random).mul_(0.3).to(dtype)
        starts = torch.arange(E) * (layout.nbytes // dtype.itemsize)
        x = torch.randn(T, H, generator=random).to(dtype)
        expected = torch.zeros(T * K, H)
        for pair, expert in enumerate(keys.flatten().tolist()):
            views = layout.views(arena.view(torch.uint8)[expert * layout.nbytes :])
            def project(x, name):
                weights = views[name] if is_transposed else views[name].mT
                y = (x.float() @ weights.float()).to(dtype)
                return y + views[f"{name}_bias"] if has_bias else y
            inner = project(x[pair // K : pair // K + 1], name)
            expected[pair] = project(gate(inner), "down_proj").float()
        strides = Strides.whole(layout, is_transposed=is_transposed, are_paired=gate.take_turns)
        few, many = torch.zeros(T * K, H), torch.zeros(T * K, H)
        gated.GatedKernels(strides, gate).multiply(x, keys.int(), starts, arena, few)
        groups = SortedPairs(keys.numpy())
        order, tiles = (torch.from_numpy(one) for one in (groups.order, groups.tiles({0: 0, 1: 1, 2: 2}, 16)))
        sizes = {"top_k": K, "block_tokens": 16}
        gated_tiles.multiply(x, order, tiles, starts, arena, strides=strides, y=many, gate=gate, **sizes)
        for y in (few, many):
            error = (y.to(dtype).float() - expected).abs().max() / expected.abs().max()
            print(json.dumps([gate.rule, str(dtype).removeprefix("torch."), error.item()]))
"""

SUMS = """
import torch
from runtime.kernels.gpu.experts import weighted_sum
random = torch.Generator().manual_seed(0)
y, weights = torch.randn(3, 4, 40, generator=random).half(), torch.rand(3, 4, generator=random)
keys = torch.stack([torch.randperm(9, generator=random)[:4] for _ in range(3)])
for dtype in (torch.float16, torch.float32):
    expected, ours = torch.zeros(3, 40, dtype=dtype), torch.empty(3, 40, dtype=torch.float16)
    for token in range(3):
        for rank in keys[token].argsort().tolist():
            expected[token] += (y[token, rank] * weights[token, rank, None]).to(dtype)
    weighted_sum.combine(y.float().flatten(0, 1), keys, weights, ours, is_wide=dtype is torch.float32)
    print(int(torch.equal(ours, expected.half())))
"""


@needs_triton
def test_kernels_of_every_gate_give_what_torch_gives() -> None:
    lines = [json.loads(line) for line in interpret(EXPERTS, json.dumps([CASES, list(ALLOWED)]))]
    assert len(lines) == 2 * len(CASES) * len(ALLOWED)
    for rule, dtype, error in lines:
        assert error <= ALLOWED[dtype], (rule, dtype, error)


@needs_triton
def test_sums_are_rounded_where_the_family_rounds() -> None:
    """Every share and every sum, or only the whole."""
    assert interpret(SUMS) == ["1", "1"]


@pytest.mark.parametrize("family", FOUND)
def test_the_gate_of_a_family(family: str) -> None:
    assert gate_of(moe_layers(tiny(family))[0].experts) == FOUND[family]


def test_a_gate_that_the_kernels_do_not_know_is_none() -> None:
    """Another activation, one that learns, and experts that end in a norm."""
    assert gate_of(SimpleNamespace(has_gate=False, act_fn=torch.tanh)) is None
    assert gate_of(SimpleNamespace(has_gate=False, act_fn=torch.nn.PReLU())) is None
    own = SimpleNamespace(has_gate=False, act_fn=torch.nn.functional.silu)
    assert gate_of(own) == Gate("silu", has_up=False)
    own.has_post_expert_norm = True
    assert gate_of(own) is None

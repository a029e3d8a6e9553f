"""The GPU kernels for experts and whole sessions on them, run by triton's interpreter on a CPU."""

import json
from pathlib import Path

import numpy as np
import pytest

from runtime.kernels.gpu.tiles import SortedPairs
from tests.helpers.triton_process import interpret, needs_triton
from tools.make.families import tiny

pytestmark = pytest.mark.slow

OTHERS = (
    "aria_text",
    "gemma4_text",
    "nemotron_h",
)  # matrices [in, out]; gated by GELU; without up, squared ReLU
# Tokens, ranks, experts, hidden, neurons, and neurons of the top segment.
SIZES = [(1, 1, 1, 7, 5, 5), (2, 2, 8, 38, 20, 7)]
MANY = {  # full and partial blocks; experts with no token, with few, with more than a tile holds
    "ragged": (37, 3, 5, 38, 20, 7),
    "one rank": (9, 1, 4, 33, 16, 7),
    "all to one": (21, 2, 4, 32, 16, 8),
}
ALLOWED = {
    "float32": 1e-6,
    "float16": 1e-3,
    "bfloat16": 6e-2,
}  # the interpreter truncates bfloat16 where a GPU rounds
KERNELS = """
import json, sys
import torch
from torch.nn import functional as F
from runtime.kernels.gpu.experts import gated
from runtime.kernels.gpu.experts import gated_tiles
from runtime.kernels.gpu.experts import weighted_sum
from runtime.kernels.gpu.tiles import SortedPairs
from runtime.kernels.gpu.addressing import Strides
gated._ROWS, gated._COLUMNS, weighted_sum._OUTPUTS = 16, 32, 64
gated_tiles._OUTPUTS = 32
sizes, dtypes, is_many, name = json.loads(sys.argv[1])
random = torch.Generator().manual_seed(0)
T, K, E, H, I, TOP = sizes
keys = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(T)])
if name == "all to one":
    keys[:, 0], keys[:, 1] = 2, -1
elif K > 1:
    keys[-1, 1] = -1
    keys[keys == 4] = -1  # an expert without a token
def cut(inner, down, neurons):  # for each neuron its row of gate, its row of up, its column of down
    gate, up = inner.chunk(2)
    return torch.stack((gate[neurons], up[neurons], down.T[neurons]), 1).flatten()
for dtype in [getattr(torch, name) for name in dtypes]:
    stride = -(-(3 * H * I + 64) // 16) * 16  # experts begin on 64-byte borders
    whole, experts = torch.zeros(E * stride, dtype=dtype), []
    starts = torch.randperm(E, generator=random) * stride
    segments = torch.zeros(2 * E * stride, dtype=dtype)
    for expert, start in enumerate(starts.tolist()):
        inner, down = (torch.randn(n, m, generator=random).mul(m**-0.5).to(dtype) for n, m in ((2 * I, H), (H, I)))
        whole[start : start + 2 * I * H], whole[start + 2 * I * H + 32 :][: H * I] = inner.flatten(), down.flatten()
        top, bottom = cut(inner, down, slice(TOP)), cut(inner, down, slice(TOP, I))
        segments[start + 16 :][: top.numel()], segments[E * stride + start :][: bottom.numel()] = top, bottom
        experts.append((inner, down))
    x, weights = torch.randn(T, H, generator=random).to(dtype), torch.rand(T, K, generator=random)
    expected = torch.zeros_like(x)
    for expert, (inner, down) in enumerate(experts):
        for token, rank in (keys == expert).nonzero().tolist():
            gate, up = F.linear(x[token], inner).chunk(2)
            expected[token] += (F.linear(F.silu(gate) * up, down) * weights[token, rank]).to(dtype)
    def segment(first, neurons):
        return Strides(neurons, first, first + H, first + 2 * H, 3 * H, 1, 3 * H, is_cut=True)
    arenas = [("whole", whole, [(starts, Strides(I, 0, I * H, 2 * I * H + 32, H, I, 1, is_cut=False))])]
    arenas.append(("cut", segments, [(starts, segment(16, TOP)), (starts + E * stride, segment(0, I - TOP))]))
    for way, arena, parts in arenas:
        rounded = dtype if is_many and way == "whole" else torch.float32
        y, out = torch.zeros(T * K, H, dtype=rounded), torch.empty_like(x)
        for turn in range(2):  # experts of even number first, the others later
            for begin, strides in parts:
                if is_many:
                    groups, size = SortedPairs(keys.numpy()), gated_tiles.tile_tokens(T * K, E)
                    numbers = {key: key for key in keys.unique().tolist() if key >= 0 and key % 2 == turn}
                    if numbers:
                        order, tiles = (torch.from_numpy(one) for one in (groups.order, groups.tiles(numbers, size)))
                        sizes = {"top_k": K, "block_tokens": size}
                        gated_tiles.multiply(x, order, tiles, begin, arena, strides=strides, y=y, **sizes)
                else:
                    numbers = torch.where((keys % 2 == turn) & (keys >= 0), keys, -1).to(torch.int32)
                    gated.GatedKernels(strides).multiply(x, numbers, begin, arena, y)
        weighted_sum.combine(y, keys, weights, out)
        error = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
        print(json.dumps([way, str(dtype).removeprefix("torch."), error.item()]))
"""
SESSIONS = """
import json, sys
from pathlib import Path
import torch
from runtime.backends.triton import triton_backend
from runtime.kernels.gpu.experts import gated
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.session.settings import EXACT, FUSED
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session, Settings
from tools.gpu.checks.made_replicas import made
gated._ROWS, gated._COLUMNS = 32, 64
CpuBackend.suits = staticmethod(lambda opened, **_: False)
triton_backend._runs_on = lambda device: True  # the interpreter runs the kernels on the CPU
ids = torch.randint(3, 96, (2, 38), generator=torch.Generator().manual_seed(2))
mask = torch.ones_like(ids)
mask[1, :4] = 0
def logits(session, is_brief, length):
    first = session.forward(ids[:1, :length])
    past, outputs = first.past_key_values, [first.logits[0]]
    for position in range(length, length + (1 if is_brief else 2)):
        now = session.forward(ids[:1, position : position + 1], past=past)
        past = now.past_key_values
        outputs.append(now.logits[0])
    if not is_brief:  # a batch, padded
        outputs.append(session.forward(ids[:, :6], mask=mask[:, :6]).logits[:, -1])
    session.controller.cache.validate()
    return torch.cat(outputs)
for folder, name, chosen, scratch, is_brief in json.loads(sys.argv[1]):
    opened = open_model(folder)
    runs, artefacts = {}, Artefacts(replicas=made(opened, Path(scratch), is_coded="coded" in name)) if scratch else None
    for experts in (EXACT, FUSED):
        with Session(opened, Settings(**chosen, experts=experts), artefacts=artefacts) as session:
            length = 36 if name == "all resident" else 16  # 36 ask for every expert
            runs[experts] = (logits(session, is_brief, length), session.controller.counters.totals(), session.receipt())
            if experts == FUSED and session.parts.is_fused:
                on_device = len(session.engine.steps.backend.whole)
    (exact, exact_counts, _), (fused, fused_counts, receipt) = runs[EXACT], runs[FUSED]
    error = ((fused - exact).abs().max() / exact.abs().max()).item()
    counts_alike = exact_counts == fused_counts
    print(json.dumps([opened.family, name, error, counts_alike, receipt["experts_of_a_token"], on_device]))
"""
TOKENS = """
import sys
import numpy as np
import torch
from runtime.backends.triton import triton_backend
from runtime.kernels.gpu.experts import gated
from runtime.model.arithmetic import accumulate, assign, gather, weigh
from tests.runtime.backends.test_torch_backend import tokens
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.session.settings import FUSED
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
gated._ROWS, gated._COLUMNS = 32, 64
CpuBackend.suits = staticmethod(lambda opened, **_: False)
triton_backend._runs_on = lambda device: True
opened = open_model(sys.argv[1])
with Session(opened, Settings(preset="full", experts=FUSED)) as session:
    session.forward(torch.arange(3, 27)[None])
    resident, fused, module = session.engine.steps.resident, session.engine.steps.backend, opened.layers[0].experts
    random = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(3, opened.config.hidden_size, generator=random), torch.rand(3, 2, generator=random)
    selected = np.array([[2, 0], [1, -1], [0, 3]])
    places, expected = session.controller.cache.places[:4], torch.zeros_like(hidden)
    assigned = assign(selected, hidden.device)
    outputs = [resident.forward(module, places[expert], gather(hidden, assigned[expert])) for expert in range(4)]
    for expert, y in enumerate(outputs):
        accumulate(expected, weigh(y, weights, assigned[expert]), assigned[expert])
    fused.begin(tokens(hidden, selected, weights, module))
    fused.add([places[3], places[1]])
    fused.add_output(0, outputs[0])  # as for an expert of the near tier
    fused.add([places[2]])
    print(((fused.finish() - expected).abs().max() / expected.abs().max()).item())

    def one_token():
        return module.moectl_forward(hidden[:1], torch.tensor([[2, 0]]), weights[:1]), fused.whole[0].tolist()

    before, starts_before = one_token()
    session.engine.clear()
    session.forward(torch.arange(20, 44)[None])  # loads experts in another order, into other slots
    after, starts_after = one_token()
    print(int(starts_before != starts_after), int(torch.equal(before, after)))
"""
RUNS = {
    "all resident": {"preset": "full"},
    "loaded as wanted": {"budget": "50%"},
    "prefetched, some late": {
        "preset": "specmd",
        "budget": "50%",
        "link": "100MB/s+20us",
        "window": "16KB",
    },
    "near": {"preset": "near", "budget": "25%"},
    "weakest dropped": {"budget": "50%", "policies": {"miss": "drop:rank=1"}},
    "cut in two": {
        "preset": "moepic",
        "policies": {"residency": "split:theta=0.37"},
        "budget": "50%",
        "link": "100MB/s",
        "window": "3KiB",
    },
    "replicas that stay": {
        "preset": "uniform-bits",
        "policies": {"residency": "shadow:bits=3,slots=no"},
        "budget": "60%",
    },
    "coded replicas that stay": {
        "preset": "uniform-bits",
        "policies": {"residency": "shadow:bits=1.25,slots=no"},
        "budget": "60%",
    },
    "replicas over the link": {"policies": {"miss": "fetch_lowest"}, "budget": "50%"},
}
EVERYWHERE = "all resident"


@needs_triton
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_of_few_tokens_give_what_the_module_gives(sizes: tuple[int, ...]) -> None:
    check(interpret(KERNELS, json.dumps([sizes, list(ALLOWED), False, ""])))


@needs_triton
@pytest.mark.parametrize("name", MANY)
def test_kernels_of_many_tokens_give_what_the_module_gives(name: str) -> None:
    check(interpret(KERNELS, json.dumps([MANY[name], list(ALLOWED), True, name])))


def check(lines: list[str]) -> None:
    assert len(lines) == 2 * len(ALLOWED)
    for way, dtype, error in map(json.loads, lines):
        assert error <= ALLOWED[dtype], (way, dtype, error)


def test_tiles_have_every_pair_once() -> None:
    experts = np.array([[2, 0], [1, -1], [0, 2], [2, -1], [2, 5]])
    groups = SortedPairs(experts)
    tiles = groups.tiles({2: 7, 0: 3}, 2)
    assert tiles.tolist() == [[7, 5, 2], [7, 7, 2], [3, 2, 2]]
    served = [
        experts.ravel()[groups.order[first : first + count]].tolist()
        for _, first, count in tiles.tolist()
    ]
    assert served == [[2, 2], [2, 2], [0, 0]]


@needs_triton
def test_sessions_say_what_torch_says_and_count_alike(checkpoint, tmp_path: Path) -> None:
    """Covers prompts, tokens and batches: families with all experts resident, one family in every
    run, gpt-oss cut in two, and experts of other gates."""
    families = ["qwen2_moe", "deepseek_v2", "gpt_oss"]
    folders = [checkpoint(family) for family in families] + [tmp_path / family for family in OTHERS]
    for folder in folders[len(families) :]:
        tiny(folder.name).save_pretrained(folder)
    cases = [(str(folder), EVERYWHERE, RUNS[EVERYWHERE], "", True) for folder in folders]
    cases.append((str(checkpoint("gpt_oss")), "cut in two", RUNS["cut in two"], "", True))
    for name, chosen in RUNS.items():
        scratch = tmp_path / name
        scratch.mkdir()
        own = str(scratch) if "replicas" in name else ""
        cases.append((str(checkpoint("mixtral")), name, chosen, own, "coded" in name))
    results = [json.loads(line) for line in interpret(SESSIONS, json.dumps(cases))]
    assert len(results) == len(cases)
    for family, name, error, counts_alike, computed, num_on_device in results:
        assert error <= 5e-6 and counts_alike, (family, name, error)
        assert computed == "fused, triton"
        assert (num_on_device > 0) == (name == EVERYWHERE), (family, name)


@needs_triton
def test_experts_may_be_computed_elsewhere_and_found_again(checkpoint) -> None:
    """A fully resident layer is also found at its new slots after the fast tier was emptied and
    filled again."""
    error, found_again = interpret(TOKENS, str(checkpoint("mixtral")))
    assert float(error) <= 2e-6
    assert found_again == "1 1"

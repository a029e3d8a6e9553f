"""Compiled code gives torch's outputs for one token's experts, wherever they lie and whenever they
arrive."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from artifacts.quantisation.packing import Packed
from artifacts.quantisation.widths import SCALAR_WIDTHS
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.backends.cpu.form import TokenOperands
from runtime.backends.cpu.forms_cpu import CpuWhole
from runtime.control.plan import Place
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.gates import RULES, SILU, Gate
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.kernels.low_bit import linear
from runtime.model.arithmetic import DOWN, GATE_UP, UP
from runtime.model.layout import ExpertLayout, aligned
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Output, Session, Settings
from runtime.session.settings import EXACT, FUSED
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY, save
from tests.runtime.session.test_session import plain_model
from tools.gpu.checks.low_bit import random_packed

pytestmark = pytest.mark.slow

OTHERS = {"gpt_oss"}  # biased, transposed, with its own kind of gate
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}  # of the largest logit, with norms and attention compiled
OF_OUTPUTS = {
    torch.float32: 1e-6,
    torch.float16: 1.25e-3,
    torch.bfloat16: 1e-2,
}  # of the largest output of an expert
WHOLE_VECTORS = {"hidden_size": 64, "intermediate_size": 96}
LOSSY = "weakest dropped"
SETTINGS = {
    "all resident": Settings(preset="full"),
    "loaded as wanted": Settings(budget="50%"),
    "prefetched, some late": Settings(preset="specmd", budget="50%", link="100MB/s+20us"),
    "near": Settings(preset="near", budget="25%"),
    "cut in two": Settings(preset="moepic", budget="50%", link="200MB/s"),
    LOSSY: Settings(budget="25%", policies={"miss": "drop:rank=1"}),
}


FAMILIES_AND_DTYPES = [(f, d) for f in FAMILIES if f not in OTHERS for d in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=[*FAMILIES_AND_DTYPES, ("mixtral", "float16")], ids="-".join)
def opened(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[MoeModel]:
    family, dtype = request.param
    opened = open_model(str(checkpoint(family, "hub", dtype)))
    yield opened
    opened.store.close()


@pytest.fixture(scope="module")
def plain(opened: MoeModel) -> torch.Tensor:
    return decoded(opened, SETTINGS["loaded as wanted"])


def decoded(opened: MoeModel, settings: Settings, **own: str) -> torch.Tensor:
    """Logits [n, V] of ten tokens, one at a time."""
    least = f"{opened.shape.num_layers * opened.shape.top_k}x"
    chosen = {
        "preset": settings.preset,
        "policies": settings.policies,
        "link": settings.link,
        "budget": least,
    }
    with Session(opened, Settings(**chosen, **own)) as session:
        session.new_requests(1)
        logits = of_ten_tokens(lambda ids, past: session.forward(ids, past=past))
        session.controller.cache.validate()
    return logits


def of_ten_tokens(forward: Callable[[torch.Tensor, object], Output]) -> torch.Tensor:
    ids = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(2))
    output = forward(ids[:, :6], None)
    logits = []
    for position in range(6, 16):
        output = forward(ids[:, position : position + 1], output.past_key_values)
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("name", SETTINGS)
def test_decoding_gives_the_logits_of_torch(
    opened: MoeModel, plain: torch.Tensor, name: str
) -> None:
    """All lossless policies give the same logits, also where torch would round the halves of an
    expert separately. The chosen tokens are torch's best but for ties: what it rounds depends on
    the processor."""
    fused = decoded(opened, SETTINGS[name], experts=FUSED)
    exact = decoded(opened, SETTINGS[name]) if name == LOSSY else plain
    largest = exact.abs().max()
    assert (fused - exact).abs().max() <= TOLERANCE[exact.dtype] * largest
    behind = exact.max(dim=1).values - exact.gather(1, fused.argmax(dim=1, keepdim=True))[:, 0]
    assert behind.max() <= torch.finfo(exact.dtype).eps * largest


@pytest.mark.parametrize("name", ["near", "cut in two"])
def test_any_number_of_threads_gives_the_same_logits(
    name: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of compiled code: torch's own number of threads, with which it may round differently,
    stays."""
    used = []
    close = KernelThreads.close

    def closed(threads: KernelThreads) -> None:
        used.append(threads.num_used)
        close(threads)

    monkeypatch.setattr(KernelThreads, "close", closed)
    monkeypatch.setattr("runtime.kernels.cpu.threads.MIN_SHARE", 1)
    monkeypatch.setattr("runtime.kernels.cpu.threads.MIN_ROWS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    opened = open_model(str(checkpoint("olmoe", "hub", "bfloat16")))
    logits = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        logits.append(decoded(opened, SETTINGS[name], experts=FUSED))
    assert torch.equal(*logits) and used == [1, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["loaded as wanted", "near"])
def test_a_prompt_gives_the_logits_of_torch_whatever_number_of_its_tokens_an_expert_has(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = set()
    forward = CpuWhole.forward

    def counted(
        form: CpuWhole, place: Place, start: int, x: torch.Tensor, like: np.ndarray
    ) -> torch.Tensor:
        counts.add(len(x))
        return forward(form, place, start, x, like)

    monkeypatch.setattr(CpuWhole, "forward", counted)
    opened = open_model(str(save("olmoe", "hub", tmp_path, dtype, fields=WHOLE_VECTORS)))
    most_tokens = CpuWhole(opened.store.layout).most_tokens
    has_kernel = (
        kernels("cpu.lanes").HAS_PAIRS
        if dtype is torch.bfloat16
        else kernels("cpu.lanes").HAS_WIDE_HALVES
    )
    assert most_tokens == ((16 if dtype is torch.bfloat16 else 64) if has_kernel else 1)
    ids = torch.randint(3, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(2))
    logits = {}
    for experts in (EXACT, FUSED):
        with Session(opened, replace(SETTINGS[name], experts=experts)) as session:
            session.new_requests(len(ids))
            logits[experts] = session.forward(ids).logits
        assert not counts or experts == FUSED
    if most_tokens > 1:
        assert {2, 3, 4, 5} <= counts and max(counts) <= most_tokens
    else:  # this processor has no kernel for several tokens
        assert not counts
    difference = (logits[FUSED] - logits[EXACT]).abs().max()
    assert difference <= TOLERANCE[dtype] * logits[EXACT].abs().max()


def test_a_family_of_another_kind_is_left_to_torch(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("gpt_oss")))
    assert not CpuBackend.suits(opened)
    with Session(opened, Settings(budget="50%", experts=FUSED)) as session:
        assert session.receipt()["experts_of_a_token"] == "torch"
        assert any("fused" in line for line in session.fallbacks)


def test_an_expert_that_a_token_selects_twice_is_added_twice(tmp_path: Path) -> None:
    """By torch to the bit, wherever experts lie: it multiplies one expert by two rows."""

    def choose(gate: nn.Module, args: tuple, output: tuple) -> tuple:
        logits, weights, selected = output
        return logits, weights, torch.cat((selected[:, :1], selected[:, :-1]), dim=1)

    opened = open_model(
        str(save("olmoe", "hub", tmp_path, torch.float32, fields={"num_experts_per_tok": 3}))
    )
    plain = plain_model(tmp_path)
    for module in (*plain.modules(), *opened.model.modules()):
        if hasattr(module, "gate") and hasattr(module, "experts"):
            module.gate.register_forward_hook(choose)
    with torch.inference_mode():
        exact = of_ten_tokens(lambda ids, past: plain(ids, past_key_values=past, use_cache=True))
    fused = decoded(opened, Settings(), experts=FUSED)
    assert (fused - exact).abs().max() <= TOLERANCE[exact.dtype] * exact.abs().max()
    for name in ("all resident", "loaded as wanted", "near"):
        assert torch.equal(decoded(opened, SETTINGS[name]), exact), name


def test_the_receipt_names_what_computes(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    for experts, name in (("exact", "torch"), (FUSED, "fused")):
        with Session(opened, Settings(budget="50%", experts=experts)) as session:
            assert session.receipt()["experts_of_a_token"] == name


GATES = (
    Gate("gelu"),
    Gate("gelu_tanh"),
    Gate("relu2", has_up=False),
    Gate("silu", limit=0.4),
    Gate("scaled", alpha=1.702, limit=0.4),
)
SIZES_AND_GATES = [(h, n, SILU) for h in (1, 7, 64, 130) for n in (1, 5, 48)]
SIZES_AND_GATES += [(130, 48, gate) for gate in GATES]


@pytest.mark.parametrize(
    ("hidden", "neurons", "gate"), SIZES_AND_GATES, ids=lambda one: getattr(one, "rule", str(one))
)
@pytest.mark.parametrize("dtype", AS_NUMPY, ids=str)
def test_kernels_equal_the_module_at_odd_sizes(
    hidden: int, neurons: int, gate: Gate, dtype: torch.dtype
) -> None:
    """Whole and cut: the top and the bottom of an expert add up to it."""
    random = torch.Generator().manual_seed(hidden * neurons)
    num_inner = 2 if gate.has_up else 1
    inner = (torch.randn(3, num_inner * neurons, hidden, generator=random) / hidden**0.5).to(dtype)
    down = (torch.randn(3, hidden, neurons, generator=random) / neurons**0.5).to(dtype)
    x = torch.randn(1, hidden, generator=random).to(dtype)
    weights = torch.rand(3, generator=random).to(dtype)
    expected = torch.zeros_like(x)
    for expert in range(3):
        acts = gate(F.linear(x, inner[expert]))
        expected += F.linear(acts, down[expert]) * weights[expert]
    kind = AS_NUMPY[dtype]
    like = torch.empty(0, dtype=kind).numpy()
    own = x.float().numpy()[0]
    rows = np.arange(3)
    name = GATE_UP if gate.has_up else UP
    layout = ExpertLayout.of({name: tuple(inner[0].shape), DOWN: (hidden, neurons)}, dtype)
    whole = [aligned(layout.nbytes) for _ in range(3)]
    for content, *matrices in zip(whole, inner, down, strict=True):
        for part, matrix in zip(layout.parts, matrices, strict=True):
            content[part.offset :][: part.nbytes] = matrix.flatten().view(torch.uint8)
    cut = [
        torch.stack((*inner[e].view(num_inner, neurons, hidden), down[e].T), dim=1).contiguous()
        for e in range(3)
    ]
    halves = [
        (start, size)
        for start, size in ((0, neurons // 2), (neurons // 2, neurons - neurons // 2))
        if size
    ]
    starts = np.array([data[start].data_ptr() for data in cut for start, _ in halves])
    counts = np.array([size for _ in cut for _, size in halves])
    of = np.repeat(np.arange(3), len(halves))
    outputs = [np.zeros((3, hidden), np.float32) for _ in range(2)]
    addresses = [content.data_ptr() for content in whole]
    CpuWhole(layout, gate).multiply((), addresses, TokenOperands(own, rows, outputs[0], like))
    rule = RULES.index(gate.rule), gate.has_up, gate.constants
    kernels("cpu.gated").add_segments(starts, counts, *rule, own, of, outputs[1], like)
    for y in outputs:
        out = torch.empty_like(x)
        kernels("cpu.gated").combine(y, weights.float().numpy(), 3, out.view(kind).numpy()[0])
        difference = (out.float() - expected.float()).abs().max()
        assert difference <= OF_OUTPUTS[dtype] * expected.float().abs().max() + 1e-7


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
@pytest.mark.parametrize(
    ("hidden", "neurons", "group"), [(64, 48, 16), (33, 11, 11), (128, 32, 32)]
)
@pytest.mark.parametrize("dtype", AS_NUMPY, ids=str)
def test_packed_kernels_equal_the_oracle(
    bits: int, hidden: int, neurons: int, group: int, dtype: torch.dtype
) -> None:
    """Three ranks over two experts, one of them twice."""
    from runtime.kernels.cpu.replicas.gated_packed import (
        packed_adder,  # imported here: otherwise every test worker would compile it on collection
    )

    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(bits)).to(dtype)
    experts = [
        (
            random_packed(2 * neurons, hidden, bits, group, seed=seed),
            random_packed(hidden, neurons, bits, neurons, seed=seed),
        )
        for seed in (0, 1)
    ]
    order = [1, 0, 1]
    rows = np.array([0, 2, 1])
    addresses = np.array([[_addresses(matrix) for matrix in experts[e]] for e in order])
    groups = np.array([hidden // group, 1, neurons])
    y = np.zeros((3, hidden), np.float32)
    like = torch.empty(0, dtype=AS_NUMPY[dtype]).numpy()
    packed_adder(bits, is_narrow=dtype is torch.bfloat16)(
        addresses, groups, x.float().numpy()[0], rows, y, like
    )
    for row, expert in zip(rows, order, strict=True):
        gate, up = linear(x, experts[expert][0]).chunk(2, dim=-1)
        expected = linear(F.silu(gate) * up, experts[expert][1]).float().numpy()[0]
        largest = np.abs(expected).max()
        assert np.abs(y[row] - expected).max() <= 10 * OF_OUTPUTS[dtype] * largest


def _addresses(packed: Packed) -> list[int]:
    """Of words, scales and zero-points."""
    zeros = packed.qweight if packed.qzeros is None else packed.qzeros
    return [packed.qweight.data_ptr(), packed.scales.data_ptr(), zeros.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_nearest_even_and_keeps_values_that_are_not_finite(
    dtype: torch.dtype,
) -> None:
    values = np.array(
        [1.0, 1.00390625, 1.01171875, -1.0078125, 3e38, np.inf, -np.inf, np.nan, 1e-40], np.float32
    )
    out = torch.empty(len(values), dtype=dtype)
    kernels("cpu.gated").combine(
        values[None], np.ones(1, np.float32), 1, out.view(AS_NUMPY[dtype]).numpy()
    )
    assert torch.equal(out.isnan(), torch.from_numpy(values).isnan())
    kept = ~out.isnan()
    assert torch.equal(out[kept], torch.from_numpy(values).to(dtype)[kept])


def test_what_float16_does_not_hold_becomes_infinite_or_no_number_as_in_the_module() -> None:
    """Gate times up beyond 65504, and gates of minus infinity, whose SiLU is no number."""
    gate_up = torch.tensor(
        [[300.0], [300.0], [-60000.0], [2.0], [300.0], [-300.0], [1.0], [3.0]]
    ).half()
    x = torch.tensor([[2.0]]).half()
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    expected = F.silu(gate) * up
    assert expected.isinf().sum() == 2 and expected.isnan().sum() == 1
    acts = np.empty(4, np.float32)
    inner = F.linear(x.float(), gate_up.float()).numpy()[0]
    operands = RULES.index("silu"), True, SILU.constants, np.empty(0, np.int16)
    kernels("cpu.gated").activate(inner[:4], inner[4:], acts, *operands)
    assert torch.equal(torch.from_numpy(acts).nan_to_num(7), expected[0].float().nan_to_num(7))

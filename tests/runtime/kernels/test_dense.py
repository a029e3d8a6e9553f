"""Linear layers in compiled code agree with torch, and `uninstall` restores the model's own."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from artifacts.formats.gguf.ggml import GGML, GgmlBlocks
from artifacts.formats.gguf.ggml_encoding import encode
from runtime.kernels.cpu import threads
from runtime.kernels.cpu.dense import MOST_TOKENS, CompiledLinear, PackedLinear
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.open import open_model
from runtime.model.quantised.quantised_linear import QuantisedLinear
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.25e-3, torch.bfloat16: 1e-2}


class Holder:
    """The attributes of an opened model that `CompiledLinear` reads."""

    def __init__(self, layer: nn.Linear, *, is_router: bool = False) -> None:
        self.model = nn.Sequential(layer)
        self.layers = (SimpleNamespace(gate=layer),) if is_router else ()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 130), (64, 33), (512, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_token_agrees_with_torch(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(inputs)
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    dense = CompiledLinear(Holder(layer), KernelThreads(1))
    x = torch.randn(1, 1, inputs).to(dtype)
    with torch.inference_mode():
        theirs = layer(x)
        dense.install()
        ours = layer(x)
        assert layer(x.expand(2, 3, -1)).shape == (2, 3, outputs)
        dense.uninstall()
    assert ours.shape == theirs.shape and ours.dtype == dtype
    assert (ours - theirs).abs().max() <= TOLERANCE[dtype] * (1 + theirs.abs().max())
    assert "forward" not in vars(layer)


def _packed(
    inputs: int, outputs: int, form: GgmlBlocks, dtype: torch.dtype, *, bias: bool = True
) -> QuantisedLinear:
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    blocks = nn.Parameter(encode(layer.weight, form), requires_grad=False)
    return QuantisedLinear(blocks, form, shape=layer.weight.shape, dtype=dtype, bias=layer.bias)


@pytest.mark.parametrize("num_tokens", [1, MOST_TOKENS, MOST_TOKENS + 1, 70])
@pytest.mark.parametrize("inputs", [32, 160, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_matrices_of_few_bits_agree_with_the_dequantised_one(
    name: str, dtype: torch.dtype, inputs: int, num_tokens: int
) -> None:
    torch.manual_seed(inputs)
    layer = _packed(inputs, 45, GGML[name], dtype)
    x = torch.randn(1, num_tokens, inputs).to(dtype)
    dense = CompiledLinear(Holder(layer), KernelThreads(1))
    exact = F.linear(
        x.float(), layer.form.dequantise({"blocks": layer.blocks.data}), layer.bias.float()
    )
    with torch.inference_mode():
        theirs = layer(x)
        assert torch.equal(theirs, F.linear(x, layer.weight, layer.bias))
        dense.install()
        ours = layer(x)
        dense.uninstall()
    assert ours.shape == theirs.shape and ours.dtype == dtype and "forward" not in vars(layer)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    assert (ours.float() - exact).abs().max() <= bound * exact.abs().max()


def test_a_matrix_of_few_bits_divided_between_threads_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "MIN_SHARE", 1 << 10)
    monkeypatch.setattr(threads, "MIN_ROWS", 1 << 10)
    layer = _packed(160, 77, GGML["Q4_0"], torch.bfloat16)
    x = torch.randn(2, 160).bfloat16()
    outputs = []
    for count in (1, 3):
        with closing(KernelThreads(count)) as shared:
            outputs.append(PackedLinear(layer, shared).forward(x))
            assert shared.num_used == count
    assert torch.equal(*outputs)


def test_a_router_that_is_a_plain_linear_layer_is_not_replaced() -> None:
    layer = nn.Linear(3, 2)
    for is_router in (True, False):
        CompiledLinear(Holder(layer, is_router=is_router), KernelThreads(1)).install()
        assert ("forward" in vars(layer)) != is_router


def test_split_experts_leave_linear_layers_to_torch_even_when_a_window_is_measured(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split experts are fused by default; other layers must keep the model's own bits."""
    installed = []
    monkeypatch.setattr(CompiledLinear, "install", lambda dense: installed.append(dense))
    opened = open_model(str(checkpoint("olmoe")))
    cut = Settings(
        budget="50%", link="1GB/s", policies={"residency": "split", "prefetch": "next_gate"}
    )
    for settings, times in ((cut, 0), (replace(cut, experts=FUSED), 2)):
        with Session(opened, settings) as session:
            assert session.parts.is_fused and session.parts.window > 0
        assert len(installed) == times

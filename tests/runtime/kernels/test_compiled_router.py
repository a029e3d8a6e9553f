"""Compiled routers choose what the module chooses, and leave to it what rounding could change."""

import pytest
import torch
from torch import nn

from runtime.kernels.cpu.decoder.compiled_router import compiled_router
from runtime.model.layers import moe_layers
from tools.make.families import tiny

_MATRICES = ("mixtral", "olmoe", "qwen2_moe", "granitemoe", "gpt_oss", "jamba")
_OTHERS = ("deepseek_v3", "glm4_moe", "minimax_m2")  # with biases of the choice, groups, sigmoids


def _gate(family: str, dtype: torch.dtype) -> nn.Module:
    return moe_layers(tiny(family).to(dtype))[0].gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", _MATRICES)
@torch.inference_mode()
def test_one_token_gets_the_experts_of_the_module(family: str, dtype: torch.dtype) -> None:
    gate = _gate(family, dtype)
    router = compiled_router(gate)
    inputs = gate.weight.shape[1]
    tokens = torch.randn(200, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    for token in tokens:
        theirs = gate(token[None])
        ours = router.forward(token[None])
        assert [(each.shape, each.dtype) for each in ours] == [
            (each.shape, each.dtype) for each in theirs
        ]
        assert set(ours[2][0].tolist()) == set(theirs[2][0].tolist())
        bound = 1e-5 if dtype is torch.float32 else 2**-6
        for own, other in zip(ours[:2], theirs[:2], strict=True):
            assert (
                own.sort().values - other.sort().values
            ).abs().max() <= bound * other.abs().max()
    assert router.num_unclear < len(tokens) // 4
    assert all(map(torch.equal, router.forward(tokens), gate(tokens)))


@torch.inference_mode()
def test_a_choice_that_rounding_could_change_is_the_modules() -> None:
    gate = _gate("olmoe", torch.bfloat16)
    gate.weight[:] = gate.weight[0]
    router = compiled_router(_gate("olmoe", torch.bfloat16))
    token = torch.ones(1, gate.weight.shape[1])
    assert router.route(token.bfloat16()) is not None and compiled_router(gate) is None
    assert router.route(torch.full_like(token, torch.nan).bfloat16()) is None
    gate = _gate("olmoe", torch.float32)
    router = compiled_router(gate)
    gate.weight[1:] = gate.weight[0]
    assert router.route(token) is None
    assert all(map(torch.equal, router.forward(token), gate(token))) and router.num_unclear == 1


@pytest.mark.parametrize("family", _OTHERS)
def test_routers_of_another_kind_stay_the_modules(family: str) -> None:
    assert compiled_router(_gate(family, torch.float32)) is None


def test_a_matrix_alone_is_no_router() -> None:
    assert compiled_router(nn.Linear(8, 4)) is None

"""RMS norms in compiled code agree with the modules, and other modules are left alone."""

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from runtime.kernels.cpu.decoder.compiled_norm import NUMBA, CompiledNorm
from runtime.kernels.decoder.norms import recognise_norm

_HIDDEN = 96


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "is_float32"),
    [(OlmoeRMSNorm, False), (GptOssRMSNorm, True), (Qwen3NextRMSNorm, False)],
    ids=["rounded before the weight", "float32 weight", "one more than the weight"],
)
def test_one_token_agrees_with_the_module(kind: type, is_float32: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind(_HIDDEN, eps=1e-3)
    x = torch.randn(40, 1, 1, _HIDDEN).to(dtype)
    module.weight.data += 0.2 * torch.randn(_HIDDEN)
    module = module if is_float32 else module.to(dtype)
    compiled = CompiledNorm(module, recognise_norm(module, dtype, NUMBA), dtype)
    with torch.inference_mode():
        theirs = module(x)
        ours = torch.cat([compiled.forward(token[None]) for token in x])
        assert torch.equal(compiled.forward(x), theirs)
    if dtype is torch.float32:
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    # sums in another order round some number in a thousand otherwise; another rounding would a
    # third of them
    else:
        assert (ours != theirs).float().mean() < 0.005


def test_other_modules_are_no_rms_norms() -> None:
    for module in (
        nn.LayerNorm(_HIDDEN, bias=False),
        nn.Linear(_HIDDEN, 1, bias=False),
        nn.Embedding(_HIDDEN, 1),
        Qwen3NextRMSNormGated(_HIDDEN),
        nn.SiLU(),
    ):
        assert recognise_norm(module, torch.float32, NUMBA) is None
    assert recognise_norm(OlmoeRMSNorm(_HIDDEN), torch.float64, NUMBA) is None

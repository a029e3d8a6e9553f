"""Decoded tokens in compiled code agree with the modules in every family that is compiled; others
are left alone."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from artifacts.formats.gguf.ggml import GGML, GgmlBlocks
from artifacts.formats.gguf.ggml_encoding import encode
from runtime.kernels.cpu.decoder.decoder import CompiledDecoder
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.decoder.trial import ModuleTrial
from runtime.model.layers import moe_layers
from runtime.model.open import open_model
from runtime.model.quantised.quantised_linear import QuantisedLinear
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES
from tools.make.families import tiny

_NUM_PROMPT = 12
_NUM_DECODED = 8
# Over the largest logit: of the largest deviation, in 16 bits of the mean one, since routers may
# choose otherwise.
_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
_COMPILED = {
    **dict.fromkeys(
        ("aria_text", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint"), 2
    ),
    **dict.fromkeys(
        ("glm4_moe", "glm4v_moe", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"), 2
    ),
    **dict.fromkeys(
        ("hunyuan_v1_moe", "hy_v3", "kolibri1", "mellum", "minimax_m2", "minimax_m3_vl_text"), 2
    ),
    **dict.fromkeys(
        ("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "solar_open"), 2
    ),
    **dict.fromkeys(("granitemoehybrid", "jamba", "lfm2_moe", "nemotron_h"), 1),
}
_LEFT = {
    "afmoe": {"AfmoeAttention: further parts: gate_proj": 2},
    "deepseek_v3": {"DeepseekV3Attention: projections of another kind": 2},
    "mimo_v2_flash": {"MiMoV2FlashAttention: another arithmetic": 2},
    "minimax": {
        "MiniMaxAttention: one token in a cache of another kind": 1,
        "MiniMaxLightningAttention: projections of another kind": 1,
    },
    "qwen3_next": {
        "Qwen3NextAttention: heads of unknown size": 1,
        "Qwen3NextGatedDeltaNet: projections of another kind": 1,
    },
}


@cache
def _tiny(family: str) -> PreTrainedModel:
    return tiny(family)


def _decoder(model: PreTrainedModel) -> CompiledDecoder:
    """Of a model without a checkpoint, which has the attributes that are read."""
    opened = SimpleNamespace(
        model=model, layers=moe_layers(model), dtype=model.dtype, activations=None
    )
    return CompiledDecoder(opened, KernelThreads(1))


@torch.inference_mode()
def _decoded(model: PreTrainedModel, *, batch: int = 1) -> tuple[torch.Tensor, object]:
    """The logits [T, V] of tokens that are decoded one by one after a prompt, and the cache."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (batch, _NUM_PROMPT + _NUM_DECODED), generator=random)
    past = model(input_ids=ids[:, :_NUM_PROMPT], use_cache=True).past_key_values
    logits = []
    for place in range(_NUM_PROMPT, ids.shape[1]):
        logits.append(
            model(input_ids=ids[:, place : place + 1], past_key_values=past, use_cache=True).logits[
                :, -1
            ]
        )
    return torch.cat(logits).float(), past


def _assert_near(model: PreTrainedModel, decoder: CompiledDecoder) -> object:
    """Compare compiled code with the modules. Returns the cache of the compiled run."""
    theirs, _ = _decoded(model)
    decoder.install()
    ours, past = _decoded(model)
    decoder.uninstall()
    deviations = (ours - theirs).abs() / theirs.abs().max()
    deviation = deviations.max() if model.dtype is torch.float32 else deviations.mean()
    assert 0 < deviation <= _BOUNDS[model.dtype]
    return past


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", _COMPILED)
def test_decoded_tokens_agree_with_the_modules(family: str, dtype: torch.dtype) -> None:
    model = _tiny(family).to(dtype)
    decoder = _decoder(model)
    assert decoder.receipt()["attentions"] == _COMPILED[family]
    _assert_near(model, decoder)


def _pack(model: PreTrainedModel, form: GgmlBlocks) -> PreTrainedModel:
    """The model with the projections of its attentions in few bits."""
    found = [(parent, *each) for parent in model.modules() for each in parent.named_children()]
    for parent, name, layer in found:
        if name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            blocks = torch.nn.Parameter(encode(layer.weight.detach(), form), requires_grad=False)
            packed = QuantisedLinear(
                blocks, form, layer.bias, shape=layer.weight.shape, dtype=model.dtype
            )
            setattr(parent, name, packed)
    return model


@pytest.mark.parametrize("form", [None, "Q8_0", "Q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "gpt_oss", "phimoe"])
def test_a_block_gives_the_bits_of_its_parts(
    family: str, dtype: torch.dtype, form: str | None
) -> None:
    """Norms of another kind, and layers with a sliding window, are left."""
    model = _pack(tiny(family).to(dtype), GGML[form]) if form else _tiny(family).to(dtype)
    decoder = _decoder(model)
    decoder.install()
    at_once, _ = _decoded(model)
    blocks = [
        module
        for module in model.modules()
        if "DecoderLayer" in type(module).__name__ and "forward" in vars(module)
    ]
    assert len(blocks) == decoder.receipt()["blocks"] == {"phimoe": 0, "gpt_oss": 1}.get(family, 2)
    for module in blocks:
        del module.forward
    one_by_one, _ = _decoded(model)
    decoder.uninstall()
    assert torch.equal(at_once, one_by_one)


@pytest.mark.parametrize("family", _LEFT)
def test_attention_that_is_computed_otherwise_stays_the_modules(family: str) -> None:
    model = _tiny(family)
    decoder = _decoder(model)
    assert decoder.receipt()["attentions_left"] == _LEFT[family]
    _assert_near(model, decoder)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"], ids=["eager, sinks", "sdpa"])
def test_positions_beyond_a_sliding_window_are_not_attended_to(family: str) -> None:
    _, model = FAMILIES[family]({"sliding_window": 5})
    decoder = _decoder(model)
    assert decoder.receipt()["attentions"] == 2
    past = _assert_near(model, decoder)
    assert min(layer.keys.shape[2] for layer in past.layers) == 4


def test_several_requests_and_recorded_attention_are_torchs() -> None:
    model = _tiny("olmoe").float()
    decoder = _decoder(model)
    theirs, _ = _decoded(model, batch=2)
    attention = model.model.layers[0].self_attn
    seen = []
    handle = attention.register_forward_hook(lambda module, given, output: seen.append(output))
    decoder.install()
    ours, _ = _decoded(model, batch=2)
    _, past = _decoded(model)
    decoder.uninstall()
    handle.remove()
    torch.testing.assert_close(ours, theirs)  # linear layers take a token of each
    assert len(seen) == 2 * (1 + _NUM_DECODED)
    assert "moectl_room" not in vars(past.layers[0]) and "moectl_room" in vars(past.layers[1])


@torch.inference_mode()
def test_masks_and_recorded_outputs_are_the_models() -> None:
    model = _tiny("olmoe").float()
    decoder = _decoder(model)
    ids = torch.arange(3, 10)[None]
    assert decoder.receipt()["bodies"] == 1
    masks = torch.ones(1, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    for named in (*({"attention_mask": mask} for mask in masks), {"output_hidden_states": True}):

        def last(named: dict[str, object] = named) -> object:
            past = model(input_ids=ids[:, :6], use_cache=True).past_key_values
            return model(input_ids=ids[:, 6:], past_key_values=past, use_cache=True, **named)

        theirs = last()
        decoder.install()
        ours = last()
        decoder.uninstall()
        assert (ours.logits - theirs.logits).abs().max() <= 1e-5 * theirs.logits.abs().max()
        assert len(ours.hidden_states or ()) == len(theirs.hidden_states or ())


@torch.inference_mode()
def test_states_of_the_last_layer_are_given_by_compiled_code() -> None:
    """Drafts by the checkpoint's further layers start from them."""
    model = _tiny("olmoe").float()
    decoder = _decoder(model)
    ids = torch.arange(3, 10)[None]
    asked = {"use_cache": True, "output_hidden_states": -1}
    theirs = model(input_ids=ids, **asked)
    past = model(input_ids=ids[:, :6], use_cache=True).past_key_values
    for body in decoder._bodies.values():
        body._theirs = None  # it must not be needed
    decoder.install()
    ours = model(input_ids=ids[:, 6:], past_key_values=past, **asked)
    decoder.uninstall()
    torch.testing.assert_close(ours.hidden_states[-1], theirs.hidden_states[-1][:, 6:])


@pytest.mark.parametrize(("family", "num_kinds"), [("olmoe", 1), ("gpt_oss", 2)])
def test_one_layer_of_each_kind_is_tried(
    family: str, num_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has a layer with a window and one without."""
    tried: set[ModuleTrial] = set()
    forward = ModuleTrial.forward

    def noted(self: ModuleTrial, *others: object, **named: object) -> object:
        tried.add(self)
        return forward(self, *others, **named)

    monkeypatch.setattr(ModuleTrial, "forward", noted)
    receipt = _decoder(_tiny(family)).receipt()
    assert receipt["attentions"] == 2 and len(tried) == num_kinds * (1 + bool(receipt["blocks"]))


def test_a_session_installs_what_agrees_and_its_receipt_says_so(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("qwen2_moe", "hub", "bfloat16")))
    with Session(opened, Settings(budget="50%", experts=FUSED)) as session:
        replaced = {module for module in opened.model.modules() if "forward" in vars(module)}
        own = {"Attention", "DecoderLayer", "Model", "RMSNorm", "TopKRouter"}
        assert {type(module).__name__ for module in replaced} == {
            "Linear",
            *(f"Qwen2Moe{name}" for name in own),
        }
        assert opened.model.lm_head in replaced
        counts = {
            "norms": 5,
            "attentions": 2,
            "blocks": 2,
            "bodies": 1,
            "routers": 2,
            "whole": 0,
            "unclear_choices": 0,
        }
        assert session.receipt()["compiled"] == counts | {"attentions_left": {}}
    assert not any("forward" in vars(module) for module in opened.model.modules())
    with Session(opened, Settings(budget="50%")) as session:
        assert not any("forward" in vars(module) for module in opened.model.modules())
        assert session.receipt()["compiled"] == {}

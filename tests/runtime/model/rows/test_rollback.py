"""A pass whose last tokens are forgotten leaves every kind of cache as if these had never been
read."""

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from runtime.engine.fixed_past import twin_of
from runtime.model.kv_cache import coding_of
from runtime.model.rows.rollback import forgettable
from tests.runtime.session.test_shared_states import SIZES
from tools.make.families import tiny

# each keeps something else
FAMILIES = {
    "olmoe": "keys and values",
    "deepseek_v2": "latent ones",
    "gpt_oss": "windows",
    "qwen3_next": "states of linear attention",
    "nemotron_h": "nothing in some layers",
    "minimax": "states outside of layers",
    "zaya": "states beside keys and values",
    "qwen4_exp_text": "an index, and states of its embeddings",
    "glm_moe_dsa": "an index that several layers use",
    "deepseek_v4": "compressed keys",
    "unlimited_ocr": "the prompt's keys and a window",
}
PROMPT = torch.tensor([[5, 9, 2, 14, 7, 7, 3]])
NEXT = [4, 1, 5, 9]
STAY = 2


def read(model: PreTrainedModel, ids: list[int], past: Cache) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True).logits


def begun(model: PreTrainedModel, kept_as: str) -> Cache:
    coding = coding_of(model, kept_as)
    past = coding.cache(model) if coding else None
    return model(input_ids=PROMPT, past_key_values=past, use_cache=True).past_key_values


def kept(past: Cache) -> dict[str, torch.Tensor]:
    """Return all tensors of a cache, by where they are."""
    found = {}
    for number, layer in enumerate([*past.layers, past]):
        for name, value in vars(layer).items():
            several = value.items() if isinstance(value, dict) else [("", value)]
            if isinstance(value, list):
                several = enumerate(value)
            for key, one in several:
                if isinstance(one, torch.Tensor):
                    found[f"{number} {name} {key}"] = one
                elif isinstance(one, int):
                    found[f"{number} {name} {key}"] = torch.tensor(one)
    return found


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "kept_as"),
    [*((family, "auto") for family in FAMILIES), ("olmoe", "int8"), ("olmoe", "int4")],
)
def test_forgotten_tokens_were_never_read(family: str, kept_as: str) -> None:
    model = tiny(family, SIZES.get(family, {}))
    if hasattr(model.config.get_text_config(), "sliding_window"):
        model.config.get_text_config().sliding_window = 6
    right = begun(model, kept_as)
    past = begun(model, kept_as)
    before = kept(twin_of(past))
    for token in NEXT[:STAY]:
        read(model, [token], right)
    with forgettable(model, past) as passed:
        read(model, NEXT, past)
    passed.forget(len(NEXT) - STAY)
    expected = kept(right)
    ours = kept(past)
    assert expected.keys() == ours.keys()
    for place, value in expected.items():
        assert ours[place].shape == value.shape, place
        if value.dtype is not torch.uint8:  # of packed numbers, which a rounding may tip
            assert torch.allclose(ours[place], value, atol=1e-4), place
    assert any(
        place not in before or not torch.equal(before[place], value)
        for place, value in ours.items()
    )
    logits = [read(model, NEXT[:1], each) for each in (right, past)]
    assert torch.allclose(*logits, atol=1e-3)


@torch.inference_mode()
def test_a_state_that_the_last_token_brings_back_is_that_of_what_stays() -> None:
    """A convolution of the first layer sees the last tokens alone: four that come again."""
    model = tiny("nemotron_h", SIZES.get("nemotron_h", {}))
    right, past = begun(model, "auto"), begun(model, "auto")
    for token in NEXT:
        read(model, [token], right)
        read(model, [token], past)
    read(model, NEXT[:1], right)
    with forgettable(model, past) as passed:
        read(model, NEXT, past)
    passed.forget(len(NEXT) - 1)
    ours = kept(past)
    assert all(torch.allclose(ours[place], one, atol=1e-4) for place, one in kept(right).items())

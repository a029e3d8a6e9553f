"""Which calls of a model decode one token, and no more."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from runtime.engine.one_token import OneToken

KEYS = torch.zeros(1, 2, 3, 4)


def named(**own: object) -> dict[str, object]:
    past = DynamicCache()
    past.update(KEYS, KEYS, 0)
    return {"input_ids": torch.tensor([[5]]), "past_key_values": past, "use_cache": True} | own


def test_a_token_behind_others_is_one() -> None:
    token = OneToken.of(
        (), named(labels=None, output_attentions=False, logits_to_keep=1, tokenizer=object())
    )
    assert token.num_tokens == 3 and token.positions is None and token.sees_all and not token.others
    assert OneToken.of((), named(output_hidden_states=True)).others == ("output_hidden_states",)
    masked = OneToken.of(
        (), named(attention_mask=torch.tensor([[0, 1, 1, 1]]), position_ids=torch.tensor([[2]]))
    )
    assert not masked.sees_all and masked.positions.item() == 2
    positional = named()
    assert OneToken.of((positional.pop("input_ids"),), positional).ids.item() == 5


@pytest.mark.parametrize(
    "own",
    [
        {"input_ids": torch.tensor([[5, 6]])},
        {"input_ids": torch.tensor([[5], [6]])},
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 1, 8)},
        {"past_key_values": None},
        {"past_key_values": DynamicCache()},
        {"use_cache": False},
        {"return_dict": False},
        {"attention_mask": torch.ones(1, 1, 1, 4)},
        {"position_ids": torch.zeros(3, 1, 1)},
    ],
    ids=lambda own: " ".join(own),
)
def test_anything_else_is_not(own: dict[str, object]) -> None:
    assert OneToken.of((), named(**own)) is None
    assert OneToken.of((None, None), named(**own)) is None

"""Which calls of a model add one token, or a few, and no more."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from runtime.engine.next_tokens import NextTokens

KEYS = torch.zeros(1, 2, 3, 4)


def named(**own: object) -> dict[str, object]:
    past = DynamicCache()
    past.update(KEYS, KEYS, 0)
    return {"input_ids": torch.tensor([[5]]), "past_key_values": past, "use_cache": True} | own


def test_a_token_behind_others_is_one() -> None:
    token = NextTokens.of(
        (), named(labels=None, output_attentions=False, logits_to_keep=1, tokenizer=object())
    )
    assert token.num_tokens == 3 and token.positions is None and token.sees_all and not token.others
    assert NextTokens.of((), named(output_hidden_states=True)).others == ("output_hidden_states",)
    masked = NextTokens.of(
        (), named(attention_mask=torch.tensor([[0, 1, 1, 1]]), position_ids=torch.tensor([[2]]))
    )
    assert not masked.sees_all and masked.positions.item() == 2
    positional = named()
    assert NextTokens.of((positional.pop("input_ids"),), positional).ids.item() == 5


def test_a_few_tokens_are_taken_where_they_are_asked_for() -> None:
    few = named(input_ids=torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 5), logits_to_keep=2)
    assert NextTokens.of((), few) is None
    tokens = NextTokens.of((), few, most=2)
    assert (tokens.count, tokens.others) == (2, ())
    assert NextTokens.of((), few | {"logits_to_keep": 1}, most=2).others == ("logits_to_keep",)


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
    assert NextTokens.of((), named(**own)) is None
    assert NextTokens.of((None, None), named(**own)) is None

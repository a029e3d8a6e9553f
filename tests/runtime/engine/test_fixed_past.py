"""The cache object of a sequence that is lodged at fixed addresses gives the same keys and values
as before."""

import pytest
import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantoQuantizedLayer,
)

from runtime.engine.fixed_past import FixedPast, reason_not_lodged, twin_of
from tools.make.families import tiny

WINDOW = 4


def sequence(num_tokens: int, seed: int = 0) -> DynamicCache:
    """The keys and values of two layers, the second with a window."""
    past = DynamicCache()
    past.layers[:] = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)]
    add(past, num_tokens, seed)
    return past


def add(past: DynamicCache, num_tokens: int, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for layer in range(2):
        past.update(*torch.randn(2, 1, 3, num_tokens, 5, generator=random), layer)


def contents(past: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]


def are_equal(one: DynamicCache, other: DynamicCache) -> bool:
    lengths = [past.get_seq_length(layer) for past in (one, other) for layer in (0, 1)]
    return len(set(lengths)) == 1 and all(map(torch.equal, contents(one), contents(other)))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_a_lodged_sequence_grows_as_a_cache_does(num_tokens: int) -> None:
    """On both sides of a full window, until the room is full."""
    fixed = FixedPast(sequence(1), 12, torch.device("cpu"))
    past = sequence(num_tokens)
    other = sequence(num_tokens)
    fixed.lodge(past, num_tokens)
    assert fixed.holds(past) and are_equal(past, other)
    while fixed.has_room(past, fixed.num_tokens):
        fixed.count(fixed.num_tokens)
        add(fixed.cache, 1, seed=fixed.num_tokens)
        add(other, 1, seed=fixed.num_tokens)
        fixed.num_tokens += 1
        assert are_equal(past, other)
    assert fixed.num_tokens == 12


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "nemotron_h"])
def test_a_model_says_the_same_from_there(family: str) -> None:
    """With a window, states of linear attention, layers that keep nothing. Its owner goes on with
    the memory after some tokens."""
    model = tiny(family, {"sliding_window": 6} if family == "gpt_oss" else {}).eval()
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        past, other = (
            model(input_ids=ids[:, :5], use_cache=True).past_key_values for _ in range(2)
        )
        fixed = FixedPast(twin_of(past), 16, torch.device("cpu"))
        fixed.lodge(past, 5)
        for place in range(5, 14):
            fixed.count(place)
            given = {
                "input_ids": ids[:, place : place + 1],
                "position_ids": torch.tensor([[place]]),
            }
            ours = model(**given, past_key_values=fixed.cache).logits
            fixed.num_tokens += 1
            theirs = model(**given, past_key_values=other).logits
            assert fixed.holds(past) and (ours - theirs).abs().max() < 5e-6 * theirs.abs().max(), (
                place
            )
        ours, theirs = (
            model(input_ids=ids[:, 14:], past_key_values=each).logits for each in (past, other)
        )
    assert (ours - theirs).abs().max() < 5e-6 * theirs.abs().max()


def test_another_guest_leaves_the_first_as_it_was() -> None:
    fixed = FixedPast(sequence(1), 12, torch.device("cpu"))
    one = sequence(6, seed=1)
    two = sequence(3, seed=2)
    fixed.lodge(one, 6)
    fixed.lodge(two, 3)
    assert are_equal(one, sequence(6, seed=1)) and are_equal(two, sequence(3, seed=2))
    assert fixed.holds(two) and not fixed.holds(one)
    add(two, 2, seed=3)
    other = sequence(3, seed=2)
    add(other, 2, seed=3)
    assert are_equal(two, other) and not fixed.holds(two), (
        "a pass that does not know of it has added two tokens"
    )


def test_a_memory_of_another_kind_is_not_lodged() -> None:
    assert reason_not_lodged(sequence(3)) is None
    assert reason_not_lodged(object()) == "keys and values are in a object"
    past = sequence(3)
    past.layers[0] = QuantoQuantizedLayer.__new__(QuantoQuantizedLayer)
    assert reason_not_lodged(past) == "a layer keeps a QuantoQuantizedLayer"

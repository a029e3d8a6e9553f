"""A sequence that is lodged at fixed addresses looks as before to whoever holds its cache."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, QuantoQuantizedLayer

from runtime.engine.fixed_past import FixedPast, reason_not_lodged

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
    fixed, past, other = FixedPast(sequence(1), 12), sequence(num_tokens), sequence(num_tokens)
    fixed.lodge(past, num_tokens)
    assert fixed.holds(past) and are_equal(past, other)
    while fixed.has_room(past, fixed.num_tokens):
        fixed.count(fixed.num_tokens)
        add(fixed.cache, 1, seed=fixed.num_tokens)
        add(other, 1, seed=fixed.num_tokens)
        fixed.num_tokens += 1
        assert are_equal(past, other)
    assert fixed.num_tokens == 12


def test_a_window_shows_attention_what_a_cache_would() -> None:
    """In whatever order; the mask hides nothing else."""
    fixed, past = FixedPast(sequence(1), 12), sequence(2)
    fixed.lodge(past, 2)
    for num_tokens in range(2, 9):
        fixed.count(num_tokens)
        (length, first), seen = fixed.cache.get_mask_sizes(1, 1), fixed.cache.get_seq_length(1)
        is_seen = torch.arange(first, first + length) <= seen
        add(fixed.cache, 1, seed=num_tokens)
        add(past, 1, seed=num_tokens)
        fixed.num_tokens += 1
        shown = past.layers[1].keys[0, 0, :, 0] if num_tokens < WINDOW else fixed.cache.layers[1].keys[0, 0, :, 0]
        assert is_seen.sum() == min(num_tokens + 1, WINDOW) and len(shown)
        fixed.lodge(past, num_tokens + 1)


def test_another_guest_leaves_the_first_as_it_was() -> None:
    fixed, one, two = FixedPast(sequence(1), 12), sequence(6, seed=1), sequence(3, seed=2)
    fixed.lodge(one, 6)
    fixed.lodge(two, 3)
    assert are_equal(one, sequence(6, seed=1)) and are_equal(two, sequence(3, seed=2))
    assert fixed.holds(two) and not fixed.holds(one)
    add(two, 2, seed=3)
    other = sequence(3, seed=2)
    add(other, 2, seed=3)
    assert are_equal(two, other) and not fixed.holds(two), "a pass that does not know of it has added two tokens"


def test_a_memory_of_another_kind_is_not_lodged() -> None:
    assert reason_not_lodged(sequence(3)) is None
    assert reason_not_lodged(object()) == "keys and values are in a object"
    past = sequence(3)
    past.layers[0] = QuantoQuantizedLayer.__new__(QuantoQuantizedLayer)
    assert reason_not_lodged(past) == "a layer keeps a QuantoQuantizedLayer"

"""A cache's layer with spare room holds the same keys and values as one that torch extends, also in
copies of it."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from runtime.kernels.cpu.decoder.compiled_attention import CacheRoom

_HEADS = 2
_DIM = 3


def _layer(num_positions: int) -> DynamicLayer:
    layer = DynamicLayer()
    layer.update(*torch.randn(2, 1, _HEADS, num_positions, _DIM))
    return layer


def _extend(layer: DynamicLayer, token: torch.Tensor) -> None:
    """Extend a layer by a token's key and value [2, 1, N, 1, D]."""
    keys, key_step, values, value_step, length = CacheRoom.of(layer).extend(layer)
    places = (layer.keys, keys, key_step), (layer.values, values, value_step)
    for (cached, place, step), number in zip(places, token, strict=True):
        assert (cached.data_ptr(), cached.stride(1), cached.shape[2]) == (place, step, length)
        cached[:, :, -1:].copy_(number)


@pytest.mark.parametrize("num_positions", [1, 100])
def test_tokens_are_appended_as_torch_appends_them(num_positions: int) -> None:
    torch.manual_seed(0)
    ours = _layer(num_positions)
    tokens = torch.randn(150, 2, 1, _HEADS, 1, _DIM)
    theirs = copy.deepcopy(ours)
    places = set()
    for token in tokens:
        _extend(ours, token)
        theirs.update(*token)
        places.add(ours.keys.data_ptr())
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    assert ours.get_seq_length() == num_positions + len(tokens) and len(places) < 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_two_that_go_on_from_the_same_tensors_do_not_write_over_each_other(copied: object) -> None:
    torch.manual_seed(0)
    first = _layer(4)
    tokens = torch.randn(3, 2, 1, _HEADS, 1, _DIM)
    _extend(first, tokens[0])
    second = copied(first)
    for layer, token in ((first, tokens[1]), (second, tokens[2])):
        _extend(layer, token)
    for layer, token in ((first, tokens[1]), (second, tokens[2])):
        assert torch.equal(layer.keys[:, :, 4:], torch.cat([tokens[0, 0], token[0]], dim=2))


def test_a_cropped_layer_goes_on_and_the_tensors_given_before_stay() -> None:
    torch.manual_seed(0)
    layer = _layer(4)
    tokens = torch.randn(3, 2, 1, _HEADS, 1, _DIM)
    _extend(layer, tokens[0])
    _extend(layer, tokens[1])
    before = layer.keys
    expected = before.clone()
    layer.crop(-1)
    _extend(layer, tokens[2])
    assert torch.equal(layer.keys[:, :, 4:], torch.cat([tokens[0, 0], tokens[2, 0]], dim=2))
    assert torch.equal(before, expected)

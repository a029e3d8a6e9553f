"""Keys and values of a sequence that is alone in its passes."""

from collections.abc import Iterator

import torch
from transformers.cache_utils import Cache


def cache_nbytes(cache: Cache) -> int:
    """Return the bytes of the keys, values and states that a cache holds."""
    return sum(one.nbytes for layer in cache.layers for one in _tensors(layer))


def _tensors(layer: object) -> Iterator[torch.Tensor]:
    for held in [*vars(layer).values()]:
        several = [*held.values()] if isinstance(held, dict) else [held]
        yield from (one for one in several if isinstance(one, torch.Tensor))

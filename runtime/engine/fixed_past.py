"""Memory of one sequence (keys, values and states) at fixed addresses, as a CUDA graph needs it.

A sequence is lodged there while its tokens are replayed. Its cache object still gives the same keys
and values. The sequence is copied out when another one is lodged. A pass of another kind finds it
there, and puts longer tensors in its place.
"""

import copy
import weakref
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticLayer

from runtime.engine.fixed_layers import (
    Fixed,
    fixed_like,
    is_lodged,
    lodged,
    reason_not_fixed,
    settle,
    twin,
)


class FixedPast:
    """Room for `length` tokens of a sequence like `past`. `cache` is given to the model; its layers
    count tokens on the device. `num_tokens` is the number of tokens of the lodged sequence. Where
    it `keeps_all`, layers with a window keep all tokens, so that several can be added at once,
    and the last ones be forgotten."""

    def __init__(
        self, past: DynamicCache, length: int, device: torch.device, *, keeps_all: bool = False
    ) -> None:
        self.length = length
        self.keeps_all = keeps_all
        self.num_tokens = 0
        self._guest: Callable[[], DynamicCache | None] = _nobody
        with torch.inference_mode(False):  # a session forwards within it, and `generate` without
            self._counts = torch.zeros(len(past.layers), dtype=torch.int64, device=device)
            pairs = zip(past.layers, self._counts.unbind(), strict=True)
            self._layers = [
                fixed_like(layer, count, length, keeps_all=keeps_all) for layer, count in pairs
            ]
        with_keys = (layer for layer in self._layers if isinstance(layer, StaticLayer))
        self._first = next(with_keys, None)
        self.cache = Cache(layers=[*self._layers])

    def has_room(self, past: DynamicCache, num_tokens: int, num_new: int = 1) -> bool:
        """Return whether `num_tokens` tokens of a sequence can be lodged, and `num_new` added."""
        can_add = num_new == 1 or self.keeps_all
        fits = num_tokens + num_new <= self.length
        return can_add and fits and len(past.layers) == len(self._layers)

    def holds(self, past: DynamicCache) -> bool:
        """Return whether this sequence is lodged here, and was not changed elsewhere."""
        return self._guest() is past and all(map(is_lodged, past.layers, self._layers))

    def lodge(self, past: DynamicCache, num_tokens: int) -> None:
        """Copy a sequence here; the one before is copied out."""
        self.leave()
        pairs = zip(past.layers, self._layers, strict=True)
        past.layers[:] = [lodged(layer, fixed, self, num_tokens) for layer, fixed in pairs]
        self._guest = weakref.ref(past)
        self.num_tokens = num_tokens

    def leave(self) -> None:
        """Copy the lodged sequence out, if its cache object still exists."""
        if (past := self._guest()) is not None:
            for layer, fixed in zip(past.layers, self._layers, strict=True):
                settle(layer, fixed)
        self._guest = _nobody

    def forget(self, fixed: Fixed, count: int) -> None:
        """Take the last `count` tokens of the lodged sequence for not read, once every layer is
        cropped: the first one says it for all."""
        if fixed is self._first:
            self.num_tokens -= count

    def count(self, num_tokens: int) -> None:
        """Make the model take `num_tokens` tokens for seen."""
        self._counts.fill_(num_tokens)


def twin_of(past: DynamicCache) -> DynamicCache:
    """Return a copy of a sequence's memory, which may be continued differently."""
    other = copy.copy(past)
    for name, held in vars(past).items():
        if isinstance(held, list):  # MiniMax's states
            setattr(other, name, [*held])
    other.layers = [*map(twin, past.layers)]
    return other


def reason_not_lodged(past: object, num_new: int = 1) -> str | None:
    """Return the reason why a sequence with this memory cannot be lodged and have `num_new` tokens
    added; None if it can."""
    if type(past) is not DynamicCache or past.offloading:
        return f"keys and values are in a {type(past).__name__}"
    reasons = (reason_not_fixed(layer, num_new) for layer in past.layers)
    return next(filter(None, reasons), None)


def _nobody() -> None: ...

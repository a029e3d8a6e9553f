"""The keys and values of one sequence at addresses that stay, as a CUDA graph needs them.

A sequence is lodged there while its tokens are replayed; whoever holds its cache sees it as before. It is copied out
when another one is lodged. A pass of another kind finds it there, and puts longer tensors in its place.
"""

import weakref
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

_PARTS = ("keys", "values", "cumulative_length")  # of a dynamic layer; only a window has the last


class FixedWindow(StaticLayer):
    """The last `max_cache_len` tokens, in a ring. Its mask is made as if the ring were not turned: the order of keys
    means nothing to attention, and all of a full ring are seen. So nothing in it depends on how many tokens there were,
    and one graph serves them all."""

    is_sliding = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one token; returns the whole ring."""
        place = self.cumulative_length.remainder(self.max_cache_len).view(1)
        self.cumulative_length.add_(1)
        self.keys.index_copy_(2, place, key_states)
        self.values.index_copy_(2, place, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> torch.Tensor:
        return self.cumulative_length.clamp(max=self.max_cache_len - 1)


class FixedPast:
    """Room for `length` tokens of a sequence like `past`. `cache` is what the model is given; its layers count tokens
    on the device. `num_tokens` is how many the lodged sequence has."""

    def __init__(self, past: DynamicCache, length: int) -> None:
        self.length, self.num_tokens = length, 0
        self._guest: Callable[[], DynamicCache | None] = _nobody
        with torch.inference_mode(False):  # a session forwards within it, and `generate` without
            self._counts = torch.zeros(len(past.layers), dtype=torch.int64, device=past.layers[0].keys.device)
            self._layers = [_fixed(*each, length) for each in zip(past.layers, self._counts.unbind(), strict=True)]
        self.cache = Cache(layers=[*self._layers])

    def has_room(self, past: DynamicCache, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens can be lodged, and one more be added."""
        return num_tokens < self.length and len(past.layers) == len(self._layers)

    def holds(self, past: DynamicCache) -> bool:
        """Whether this sequence is lodged here, and nothing was done to it elsewhere."""
        return self._guest() is past and all(isinstance(one, _Lodging) and one.is_lodged for one in past.layers)

    def lodge(self, past: DynamicCache, num_tokens: int) -> None:
        """Copy a sequence here; the one before is copied out."""
        self.leave()
        for layer, fixed in zip(past.layers, self._layers, strict=True):
            places = _places(fixed, num_tokens)
            fixed.keys.index_copy_(2, places, layer.keys[:, :, -len(places) :])
            fixed.values.index_copy_(2, places, layer.values[:, :, -len(places) :])
        pairs = zip(past.layers, self._layers, strict=True)
        past.layers[:] = [(LodgedWindow if layer.is_sliding else Lodged)(self, fixed, layer) for layer, fixed in pairs]
        self._guest, self.num_tokens = weakref.ref(past), num_tokens

    def leave(self) -> None:
        """Copy the lodged sequence out, if anybody still has it."""
        if (past := self._guest()) is not None:
            for layer in past.layers:
                if isinstance(layer, _Lodging):
                    layer.settle()
        self._guest = _nobody

    def count(self, num_tokens: int) -> None:
        """Have the model take so many tokens for seen."""
        self._counts.fill_(num_tokens)


def _nobody() -> None: ...


def _fixed(layer: DynamicLayer, count: torch.Tensor, length: int) -> StaticLayer:
    """Empty room like `layer`, whose tokens are counted in `count`."""
    fixed = FixedWindow(min(layer.sliding_window, length + 1)) if layer.is_sliding else StaticLayer(length)
    fixed.lazy_initialization(layer.keys, layer.values)
    fixed.cumulative_length = count
    return fixed


def _places(fixed: StaticLayer, num_tokens: int) -> torch.Tensor:
    """Where the tokens of a sequence lie, in their order; of a window, those that the next token sees."""
    count = min(num_tokens, _most(fixed))
    return torch.arange(num_tokens - count, num_tokens, device=fixed.keys.device) % fixed.max_cache_len


def _most(fixed: StaticLayer) -> int:
    """Tokens that the next one sees at most; it takes the place of the oldest in a window."""
    return fixed.max_cache_len - fixed.is_sliding


def _lodged(name: str) -> property:
    """What lies in the fixed layer until it is set."""

    def get(layer: "_Lodging") -> torch.Tensor | int:
        return vars(layer)[name] if name in vars(layer) else layer.read(name)

    def put(layer: "_Lodging", value: torch.Tensor | int | None) -> None:
        vars(layer)[name] = value

    return property(get, put)


class _Lodging:
    """A layer of a cache that lies in a `fixed` one, but for what was set since."""

    keys, values, cumulative_length = map(_lodged, _PARTS)

    def __init__(self, past: FixedPast, fixed: StaticLayer, layer: DynamicLayer) -> None:
        vars(self).update({name: value for name, value in vars(layer).items() if name not in _PARTS})
        self._past, self._fixed = past, fixed

    @property
    def is_lodged(self) -> bool:
        return self._fixed is not None and not any(name in vars(self) for name in _PARTS)

    def read(self, name: str) -> torch.Tensor | int:
        """A part as it lies there."""
        num_tokens = self._past.num_tokens
        if name == "cumulative_length":
            return num_tokens
        whole = getattr(self._fixed, name)
        if num_tokens <= _most(self._fixed):
            return whole[:, :, :num_tokens]
        return whole.index_select(2, _places(self._fixed, num_tokens))

    def settle(self) -> None:
        """Copy out what still lies there."""
        for name in _PARTS:
            if name not in vars(self):
                part = self.read(name)
                setattr(self, name, part.clone() if isinstance(part, torch.Tensor) else part)
        self._past = self._fixed = None


class Lodged(_Lodging, DynamicLayer):
    """A layer without a window."""


class LodgedWindow(_Lodging, DynamicSlidingWindowLayer):
    """A layer with one."""


def reason_not_lodged(past: object) -> str | None:
    """Why a sequence with this memory cannot be lodged; None if it can."""
    if type(past) is not DynamicCache or past.offloading:
        return f"keys and values are in a {type(past).__name__}"
    own = (DynamicLayer, DynamicSlidingWindowLayer, Lodged, LodgedWindow)
    others = {type(layer).__name__ for layer in past.layers if type(layer) not in own}
    return f"a layer keeps a {min(others)}" if others else None

"""Layers of a kv cache at fixed addresses. A layer keeps all keys and values, the keys and values
of a window, the states of linear attention, or nothing. The layers of a lodged sequence read from
these addresses.

Layers with an index of keys are left out: which of several equal keys the index selects depends on
the room behind them.
"""

import copy
from typing import Protocol

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
)

_PARTS = (
    "keys",
    "values",
    "cumulative_length",
)  # of a layer that grows; only a window has the last
_STATES = ("conv_states", "recurrent_states")
# keeps nothing; transformers 5.17 has none
_EMPTY = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
Fixed = StaticLayer | LinearAttentionLayer


class Lodging(Protocol):
    """Knows how many tokens the lodged sequence has. With `keeps_all` it can `forget` the last
    ones, as each of its layers asks for in turn."""

    num_tokens: int
    keeps_all: bool

    def forget(self, fixed: "Fixed", count: int) -> None: ...


class FixedWindow(StaticLayer):
    """The last `max_cache_len` tokens, in a ring. Its mask is made as if the ring were not turned:
    the order of keys means nothing to attention, and all of a full ring are seen. So nothing in it
    depends on how many tokens there were, and one graph serves them all."""

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


def fixed_like(
    layer: object, count: torch.Tensor, length: int, *, keeps_all: bool = False
) -> Fixed:
    """Return a fixed layer like `layer`, with room for `length` tokens, of a window too if it
    `keeps_all`. The device counts the tokens in `count`."""
    if isinstance(layer, _EMPTY):
        return layer
    if isinstance(layer, LinearAttentionLayer):
        return _states_like(layer)
    fixed = (
        FixedWindow(min(layer.sliding_window, length + 1))
        if layer.is_sliding and not keeps_all
        else StaticLayer(length)
    )
    fixed.lazy_initialization(layer.keys, layer.values)
    fixed.cumulative_length = count
    return fixed


def lodged(layer: object, fixed: Fixed, lodging: Lodging, num_tokens: int) -> object:
    """Copy the contents of a layer of `num_tokens` tokens to `fixed`. Returns the layer that takes
    its place in its cache."""
    if isinstance(layer, LinearAttentionLayer):
        _share(layer, fixed)
    if isinstance(layer, (LinearAttentionLayer, *_EMPTY)):
        return layer
    places = _places(fixed, num_tokens)
    places = places[max(0, len(places) - layer.keys.shape[2]) :]  # a window has fewer
    for name in ("keys", "values"):
        getattr(fixed, name).index_copy_(2, places, getattr(layer, name)[:, :, -len(places) :])
    return (LodgedWindow if layer.is_sliding else Lodged)(lodging, fixed, layer)


def is_lodged(layer: object, fixed: Fixed) -> bool:
    """Return whether everything that this layer keeps lies in `fixed`."""
    if isinstance(layer, _EMPTY):
        return True
    if isinstance(layer, LinearAttentionLayer):
        return all(getattr(layer, name)[0] is getattr(fixed, name)[0] for name in _STATES)
    return (
        isinstance(layer, _Shown)
        and layer.fixed is fixed
        and not any(name in vars(layer) for name in _PARTS)
    )


def settle(layer: object, fixed: Fixed) -> None:
    """Copy everything that a layer still has in `fixed` to memory of its own."""
    if isinstance(layer, LinearAttentionLayer):
        for name in _STATES:
            own = getattr(layer, name)
            there = getattr(fixed, name)
            own.update(
                {
                    key: one.clone()
                    for key, one in own.items()
                    if one is not None and one is there[key]
                }
            )
    elif isinstance(layer, _Shown) and layer.fixed is fixed:
        layer.settle()


def twin(layer: object) -> object:
    """Return a copy of a layer; additions to the copy leave this layer as it is."""
    other = copy.copy(layer)
    for name, held in vars(layer).items():
        if isinstance(held, dict):
            setattr(other, name, dict(held))
    # the others put new tensors in the place of old ones
    if isinstance(layer, LinearAttentionLayer):
        for name in _STATES:
            states = getattr(layer, name)
            setattr(
                other,
                name,
                {key: one if one is None else one.clone() for key, one in states.items()},
            )
    return other


def reason_not_fixed(layer: object, num_tokens: int = 1) -> str | None:
    """Return the reason why this layer cannot be kept at fixed addresses while that many tokens are
    added, of which some may be forgotten; None if it can."""
    if type(layer) not in _KINDS:
        return f"a layer keeps a {type(layer).__name__}"
    if num_tokens > 1:
        is_state = isinstance(layer, LinearAttentionLayer)
        return "a layer's states are read token by token" if is_state else None
    return "a layer records its past" if getattr(layer, "record_past", False) else None


def _states_like(layer: LinearAttentionLayer) -> LinearAttentionLayer:
    """Return fixed memory with room for the states of linear attention, which never grow;
    transformers writes them in place."""
    fixed = LinearAttentionLayer(layer.number_of_states)
    for number in range(layer.number_of_states):
        states = {name: getattr(layer, name)[number] for name in _STATES}
        fixed.lazy_initialization(
            **states, state_idx=number, conv_kernel_size=layer.conv_kernel_size[number]
        )
    fixed.has_previous_state = dict(layer.has_previous_state)
    return fixed


def _share(layer: LinearAttentionLayer, fixed: LinearAttentionLayer) -> None:
    """Copy a layer's states to `fixed`, and make the layer use those."""
    for name in _STATES:
        own = getattr(layer, name)
        there = getattr(fixed, name)
        for number, state in there.items():
            if state is not None:
                state.copy_(own[number])
                own[number] = state


def _places(fixed: StaticLayer, num_tokens: int) -> torch.Tensor:
    """Return the positions in `fixed` of a sequence's tokens, in their order; for a window, only of
    the tokens that the next one sees."""
    count = min(num_tokens, _most(fixed))
    return (
        torch.arange(num_tokens - count, num_tokens, device=fixed.keys.device) % fixed.max_cache_len
    )


def _most(fixed: StaticLayer) -> int:
    """Return the largest number of tokens that the next one sees; in a window it takes the place of
    the oldest."""
    return fixed.max_cache_len - fixed.is_sliding


def _shown(name: str) -> property:
    """Return a property that reads from the fixed layer until another value is set."""

    def get(layer: "_Shown") -> torch.Tensor | int:
        return vars(layer)[name] if name in vars(layer) else layer.read(name)

    def put(layer: "_Shown", value: torch.Tensor | int | None) -> None:
        vars(layer)[name] = value

    return property(get, put)


class _Shown:
    """A layer of a lodged sequence: its parts are read from the fixed layer until they are set."""

    keys, values, cumulative_length = map(_shown, _PARTS)

    def __init__(self, lodging: Lodging, fixed: StaticLayer, layer: DynamicLayer) -> None:
        vars(self).update(
            {name: value for name, value in vars(layer).items() if name not in _PARTS}
        )
        self.fixed: StaticLayer | None = fixed
        self._lodging = lodging
        self._most = min(_most(fixed), layer.sliding_window - 1) if layer.is_sliding else None

    def read(self, name: str) -> torch.Tensor | int:
        """Return a part as it lies in the fixed layer."""
        num_tokens = self._lodging.num_tokens
        if name == "cumulative_length":
            return num_tokens
        whole = getattr(self.fixed, name)
        if self.fixed.is_sliding and num_tokens > self._most:
            return whole.index_select(2, _places(self.fixed, num_tokens))
        first = 0 if self._most is None else max(0, num_tokens - self._most)
        return whole[:, :, first:num_tokens]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, a number not above 0: where they lie if all are kept there."""
        lies_there = self.fixed is not None and not any(name in vars(self) for name in _PARTS)
        if lies_there and self._lodging.keeps_all:
            self._lodging.forget(self.fixed, -tokens_to_remove)
        else:
            super().crop(tokens_to_remove)

    def settle(self) -> None:
        """Copy out everything that still lies in the fixed layer."""
        for name in _PARTS:
            if name not in vars(self):
                part = self.read(name)
                setattr(self, name, part.clone() if isinstance(part, torch.Tensor) else part)
        self.fixed = self._lodging = None


class Lodged(_Shown, DynamicLayer):
    """A layer that keeps all keys and values."""


class LodgedWindow(_Shown, DynamicSlidingWindowLayer):
    """A layer that keeps the keys and values of a window."""


_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    Lodged,
    LodgedWindow,
    LinearAttentionLayer,
    *_EMPTY,
)
